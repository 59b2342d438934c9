"""Memory that a learner has freed goes back to the system."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.runtime.garbage_collection import GROWTH_MAX, _malloc_trim, _resident_bytes, trim_heaps

MIB = 1 << 20
pytestmark = pytest.mark.skipif(_malloc_trim is None, reason=f"needs glibc, this is {sys.platform}")


def allocate(n_mib):
    """Arrays of 1 MiB in a heap: glibc maps arrays of this size one by one until one of 30 MiB was freed."""
    np.ones(30 * MIB, np.uint8)
    return [np.ones(MIB, np.uint8) for _ in range(n_mib)]


def test_free_memory_between_what_stays_is_given_back_once_there_is_a_quarter_more():
    with ThreadPoolExecutor(1) as thread:
        floor = trim_heaps(0)
        n_mib = int(0.5 * floor / MIB) + 300
        arrays = thread.submit(allocate, n_mib).result()
        stay = arrays[::50]
        del arrays
        full = _resident_bytes()
        assert full > GROWTH_MAX * floor, "expected the heap to keep what was freed in its middle"
        again = trim_heaps(floor)
        assert again <= floor + (len(stay) + 0.1 * n_mib) * MIB
        assert trim_heaps(again) == again
        del stay
