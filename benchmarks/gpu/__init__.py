"""First hour on a GPU: does what is predicted for the learner hold there, how fast is it, does a whole run work?

::

    python -m benchmarks.gpu --minutes 25        # no network, random weights
    python -m benchmarks.gpu                     # without a GPU: the same cases on small shapes
    python -m benchmarks.gpu --compile           # then: the models with torch.compile of their decoder layers

Each case has a process of its own and a share of the minutes. One that fails, crashes or takes longer is recorded as
that. Results are written after every part, and a second call goes on behind the cases that the file holds; ``--only``
repeats some.

* ``0.6b-16k``, ``1.7b-4k``, ``7b-lora``, ``7b-full``, ``moe`` (:mod:`benchmarks.gpu.learner`): Qwen3-0.6B, Qwen3-1.7B,
  Qwen2.5-7B and two layers of Qwen3-30B-A3B. ``7b-full`` has bfloat16 moments and runs where the prediction fits.
  prime-rl publishes 11,900 tokens/s and 12.5 GiB for 0.6B, rows of 16,384 tokens and recomputation on one H100
  (its ``benchmarks/results/BENCHMARKS.md``, 16 January 2026): an order of magnitude, not a race.
* ``loop`` (:mod:`benchmarks.gpu.loop`): a whole run, in which vLLM and the learner take turns on the GPU; without vLLM
  or a GPU the embedded engine
* ``layouts`` (:mod:`benchmarks.gpu.layouts`): are padded, packed and shared rows the same function?
* ``ranks`` (:mod:`benchmarks.gpu.ranks`): FSDP2 with one rank

Needed are the dependencies in ``pyproject.toml``; for the turns of the loop also vLLM.
"""
