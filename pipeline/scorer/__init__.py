"""Rewards of trajectories: the environment's own score and user functions, weighted. A failure is ``None``, never 0."""
