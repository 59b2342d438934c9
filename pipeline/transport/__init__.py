"""Acknowledged, back-pressured messages between processes. ``base`` is the contract; ``zeromq`` and ``memory`` keep
it."""
