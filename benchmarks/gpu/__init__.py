"""Check of the learner on one GPU within ten minutes: is it right, how fast is it, how far from the limits of the chip?

::

    python -m benchmarks.gpu --seconds 540          # on the GPU machine: no network, no vLLM, random weights
    python -m benchmarks.gpu                        # without a GPU: the same parts on small shapes, a minute or two

Parts are ordered by worth. One that does not fit into the time left is skipped, and one that fails is a line of the
table. Results are written after every part, so a run that is cut keeps what it has. Parts whose packages are missing
are left out, with their names.
"""
