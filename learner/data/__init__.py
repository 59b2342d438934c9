"""Groups of trajectories to rows to micro-batches."""
