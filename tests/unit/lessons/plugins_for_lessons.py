"""Writers and sources that users might have."""

import asyncio
import threading

from pipeline.lessons.store import Lesson

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


class OnlySearches:
    async def search(self, order_id, query, top_k):
        return [Lesson("1", f"about {query}")]


class Remembers(OnlySearches):
    def __init__(self, size=1):
        self.size = size

    async def summarise(self, trajectories):
        return len(trajectories)

    async def close(self):
        pass
