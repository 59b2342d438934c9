import asyncio
import os
import sys
import threading
import time

import numpy as np


def length(trajectory):
    return float(trajectory.n_sampled)


async def slowly(trajectory):
    await asyncio.sleep(0.05)
    return 0.5


twenty = asyncio.Barrier(20)
running = 0


async def in_twenties(trajectory):
    """Ends when twenty calls run at once; how many did."""
    global running
    running += 1
    try:
        await twenty.wait()
        return float(running)
    finally:
        running -= 1


async def hangs(trajectory):
    await asyncio.Event().wait()


async def holds_the_loop(trajectory):
    time.sleep(0.4)
    await asyncio.sleep(0)
    return 1.0


def gives_up_waiting(trajectory):
    raise TimeoutError("the database did not answer")


def blocks(trajectory):
    time.sleep(2)


def never_returns_for_odd_seeds(trajectory):
    if trajectory.task.seed % 2:
        threading.Event().wait()
    return 1.0


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


async def raises_cancelled(trajectory):
    raise asyncio.CancelledError


LEFT = []


async def leaves_tasks(trajectory):
    LEFT.append(asyncio.ensure_future(asyncio.sleep(3600)))
    return 1.0


async def blocks_the_loop(trajectory):
    time.sleep(60)


async def leaves(trajectory):
    sys.exit(3)


def leaves_in_a_thread(trajectory):
    sys.exit(3)


def unprintable(trajectory):
    class Unprintable(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Unprintable


def shouts(trajectory):
    raise ValueError("boom" * 1_000_000)


def odd(trajectory):
    class Odd(float):
        def __float__(self):
            raise RuntimeError("no number")

    return Odd(1)


def meddles(trajectory):
    trajectory.rewards["environment"] = 99.0
    trajectory.task.payload["rows"].clear()
    trajectory.turns[0].signals["found"] = 1.0
    return 1.0


def dies(trajectory):
    os._exit(3)


NOT_A_FUNCTION = 3


def number_of(trajectory):
    return float(trajectory.turns[-1].completion_message.content)


def batch_of_numbers(trajectories):
    return [number_of(t) for t in trajectories]


def batch_with_holes(trajectories):
    return [None if number_of(t) % 2 == 0 else 1.0 for t in trajectories]


def batch_too_short(trajectories):
    return [1.0]


def batch_with_text(trajectories):
    return ["high" if number_of(t) == 1 else 1.0 for t in trajectories]


def batch_array(trajectories):
    return np.array([number_of(t) for t in trajectories], np.float32)


def batch_mean(trajectories):
    return np.mean([number_of(t) for t in trajectories])


def length_text(trajectories):
    return "good"


def rank_of_number(trajectories):
    numbers = [number_of(t) for t in trajectories]
    return [sorted(numbers).index(n) for n in numbers]


def share_of_group(trajectories):
    return [1 / len(trajectories)] * len(trajectories)


def fails_once_for_each_first_slot(trajectories):
    """None for slot 0 of a group until it was played again."""
    values = []
    for trajectory in trajectories:
        _, slot, serial = trajectory.trajectory_id.split(".")
        values.append(None if slot == "0" and serial == "0" else len(trajectories))
    return values


def never_for_the_first_slot(trajectories):
    return [None if t.trajectory_id.split(".")[1] == "0" else 1.0 for t in trajectories]


def by_index(trajectories):
    return {index: 0.5 for index in range(len(trajectories))}


def different(trajectories):
    return {0.25 + 0.5 * index for index in range(len(trajectories))}


def one_by_one(trajectories):
    return (0.5 for _ in trajectories)


def packed(trajectories):
    return bytes(len(trajectories))
