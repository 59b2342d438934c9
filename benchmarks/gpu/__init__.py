"""Check of the learner on one GPU within ten minutes: is it right, how fast is it, how far from the limits of the chip?

::

    python -m benchmarks.gpu --seconds 540          # on the GPU machine: no network, no vLLM, random weights
    python -m benchmarks.gpu                        # without a GPU: the same parts on small shapes, a minute or two

Parts are ordered by worth. One that does not fit into the time left is skipped, and one that fails is a line of the
table. Results are written after every part, so a run that is cut keeps what it has. Parts whose packages are missing
are left out, with their names. Models have random weights in the shapes of Qwen2.5-0.5B, 1.5B and 7B and of Qwen3-0.6B.

* ``chip``: rate of a large bfloat16 product; bandwidth of the memory and to the host. MFU is the share of this rate,
  not of a data sheet; recomputation and shared prompts do not count as work.
* ``layouts``: are padded, packed and shared rows the same function, and repeatable to the bit? Padded rows in bfloat16
  may have a gradient within 0.1 of the one in float32 (norm of the difference over the norm); packed and shared rows,
  and their log-probabilities, may be 1.5 times as far from float32. A control in which rows see each other must fail.
* ``step``: a learner step and the bare Hugging Face step: tokens/s, MFU, peak memory. The row of 16,384 tokens has the
  length, shape and recomputation of a row of prime-rl's results (:func:`benchmarks.gpu.steps.long_rows`).
* ``weights``: seconds of a snapshot, its folder, its upload; of a learner that leaves the device
* ``ranks``: FSDP2 with one rank: gradient, snapshot, a checkpoint and the step after resuming
* ``loop``: a whole run; the embedded engine and the learner take turns on the GPU
* ``head``: log-probabilities of 16,384 tokens against the time of their products alone
* ``kernels``: shares of products, attention and the rest in one step

Needed are PyTorch 2.11, transformers and this repository; for the learner's parts also pydantic and orjson; for
``loop`` every dependency in ``pyproject.toml``, and transformers 5.19. For a machine without a network, wheels of what
an image with PyTorch 2.11 and transformers 5.17 may lack (16 MB, Python 3.12) can be brought::

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
      --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest wheels \\
      pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5 \\
      typing-extensions==4.16.0 orjson==3.13.0 pyzmq==27.3.0 transformers==5.19.0
    # there, in the repository:
    python3 -m pip install --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site PYTHONUNBUFFERED=1 python3 -m benchmarks.gpu --seconds 540 --out runs/gpu
"""
