"""Tokens that a run generates until it succeeds in a share of its tasks: the measurement of the studies of replay.

A run is ``afterplay run`` with all its processes. A seed changes the model's random weights, the order of the tasks and
what is drawn from the pool; the engine's sampling is random in every run. The success rate is measured outside the run:
a fixed number of rollouts of every task with the weights of every N-th version. It has reached the goal at the first of
two such measurements in a row that are at or above it; then the run is stopped. Its cost is every token that its engine
sampled and its replay stage received up to the end of that update: also those of dropped and not yet trained
trajectories and of retests. Prompt tokens are not counted.

A finished run is one JSON file in ``DIRECTORY/results`` and is not made again (:mod:`benchmarks.replay_study`).
"""
