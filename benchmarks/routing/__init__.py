"""Routing of conversations to engines: times of groups in a simulation, against hashing, sticky and least loaded.

::

    python -m benchmarks.routing rules --json raw.json         # 5 minutes
    python -m benchmarks.routing tail --json tail.json         # rollouts of coding agents, one slow engine of four
    python -m benchmarks.routing costs                         # how far the router's two constants may be wrong
    python -m benchmarks.routing concurrency                   # fixed numbers of episodes against the adaptive one
    python -m benchmarks.routing.engine_costs vllm             # measures what the simulation is given

Four engines and four actors play groups of eight conversations, a fixed number of conversations at a time; every 300 s
new weights empty the prefix caches. A group takes from its first rollout's begin to its last rollout's end. One engine
may be slower than the others. The rule was developed on seeds below 200 and seen on 300 to 409, the table is of others.
``hashing`` draws an engine for each conversation, ``sticky`` takes the one with the fewest conversations, ``least`` for
each turn the one with the fewest requests; these know the requests of their own actor alone. ``informed`` is a rule
that no router can have: it sends each turn where it takes least time, and knows what engines cost, do and keep, and
what the turn will sample. It is greedy, and so no bound.

Workloads: ``gpu``: long-tailed synthetic agents on engines with costs that were assumed, not measured (a step of 10 ms
and 0.05 ms a request, 0.04 ms a prompt token, 400,000 tokens of KV cache). ``cpu``: the same with a quarter of the
tokens, on costs measured with SmolLM2-135M on vLLM for CPUs. ``games``: games of 2 to 320 turns with actions of 2
tokens, played by a planner (:mod:`benchmarks.routing.recording`), on the costs of ``gpu``. ``recorded``: rollouts of a
real run of that model on vLLM (:mod:`benchmarks.recorded`), on the costs of ``cpu``, two waves of them; ``steady``: the
same, ten waves. ``guess``: rollouts of up to 48 turns of a real run of a tiny model on the embedded engine, likewise:
8.9 turns and 251 sampled tokens a rollout on average, a tail by chance and not of a policy that reasons. A rollout of
``recorded`` has 1.8 turns and 29 sampled tokens. ``coding``: synthetic agents that mend code, with the published sizes
of such trajectories (:func:`benchmarks.routing.conversations.coding`), on the costs of ``gpu``; ``crowded``: twice as
many at once, whose prefixes do not fit into the KV caches.
"""
