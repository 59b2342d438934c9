"""Experience replay: pool, difficulty, selection, mixing; memory for prompts; import and export."""
