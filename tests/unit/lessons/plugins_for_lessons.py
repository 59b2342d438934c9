"""Writers that users might have."""

import asyncio
import threading

hanging = threading.Event()


def two(task, trajectories):
    return [f"{task}: first", f"{len(trajectories)} played"]


async def slow_but_async(task, trajectories):
    await asyncio.sleep(0.001)
    return [f"async {task}"]


async def never(task, trajectories):
    await asyncio.Event().wait()


def hangs(task, trajectories):
    hanging.wait(30)


def fails(task, trajectories):
    raise KeyError("no such lesson")


def wrong(task, trajectories):
    return "one text"


def nothing(task, trajectories):
    return None
