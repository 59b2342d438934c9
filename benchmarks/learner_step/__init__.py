"""Tokens per second and peak memory of one learner step, against a bare transformers step and TRL's on the same rows.

::

    python -m benchmarks.learner_step                                   # 135M on the CPU (or the GPU, where one is)
    python -m benchmarks.learner_step --shape 0.5b --prompt 256 --response 700 --longest 4096 \\
        --tokens-per-microbatch 32768 --device cuda                     # one GPU
    python -m benchmarks.learner_step --layers 2 --groups 2 --steps 1   # to see that it runs

Each side runs alone in a process of its own (listed in ``sides``), one after the other. Rows (``case``): groups of
rollouts with one prompt, lengths from log-normal distributions with a long tail, vocabulary 49,152. Tokens are those of
the rows without padding; a side that computes a shared prompt once is still credited with all of them.
Goals: ``learner`` at least 0.95 of the fastest bare step's speed with a lower peak, and 1.5 times TRL's speed.
"""
