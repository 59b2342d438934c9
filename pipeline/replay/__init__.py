"""Experience replay: what is trained again."""
