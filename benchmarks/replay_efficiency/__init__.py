"""Tokens that a run generates until it succeeds in 80 % of its tasks: replay off, on, priority, guard, both.

::

    python -m benchmarks.replay_efficiency --directory efficiency     # 5 arms, seeds 0 to 4, one by one
    python -m benchmarks.replay_efficiency --directory efficiency --arms off on --seeds 0
    python -m benchmarks.replay_efficiency --directory efficiency --extra young replay.max_age=8,replay.retire_after=2

A run is ``afterplay run configs/replay_tiny.yaml`` with all its processes. A seed changes the model's random weights,
the order of the tasks and what is drawn from the pool; the engine's sampling is random in every run. The success rate
is measured outside the run: a fixed number of rollouts of every task with the weights of every 5th version. It has
reached the goal at the first of two such measurements in a row that are at or above it; then the run is stopped. Its
cost is every token that its engine sampled and its replay stage received up to the end of that update: also those of
dropped and not yet trained trajectories and of retests. Prompt tokens are not counted.

A finished run is one JSON file in ``DIRECTORY/results`` and is not made again; ``results.json``, ``results.md`` and
``replay_efficiency.png`` are rebuilt from all of them each time.
"""
