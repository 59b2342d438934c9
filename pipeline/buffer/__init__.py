"""The trajectory buffer: stored trajectories in files, drawn by priority."""
