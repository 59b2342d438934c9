"""``afterplay run FILE``: every process of a run on one machine, started, watched, restarted alone, drained."""
