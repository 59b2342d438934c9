"""``afterplay show`` and ``plot``: rollouts and curves for people."""
