import asyncio
import os
import time


def length(trajectory):
    return float(trajectory.n_sampled)


async def slowly(trajectory):
    await asyncio.sleep(0.05)
    return 0.5


async def hangs(trajectory):
    await asyncio.Event().wait()


def blocks(trajectory):
    time.sleep(2)


def raises(trajectory):
    raise KeyError("no such thing")


def text(trajectory):
    return "very good"


def nan(trajectory):
    return float("nan")


def nothing(trajectory):
    return None


def spins(trajectory):
    while True:
        pass


def dies(trajectory):
    os._exit(3)


NOT_A_FUNCTION = 3
