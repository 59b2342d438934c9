"""The stage between actors and learner: orders out, trajectories in, groups on.

``records``, ``tasks``, ``groups``, ``leases``, ``dispatch`` and ``core`` are pure state machines; ``store`` keeps them
on disk; ``role`` is the asynchronous shell. Events are applied, written in one transaction, and only then answered.
"""
