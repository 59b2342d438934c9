"""Decoded payloads in memory: first in, first out, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict

from pipeline.buffer.layout import Block


class BlockCache:
    """Blocks by trajectory id. ``bytes_max`` None: everything stays until it is removed."""

    def __init__(self, bytes_max: int | None) -> None:
        self.bytes_max = bytes_max
        self.n_bytes = 0
        self._blocks: OrderedDict[int, tuple[Block, memoryview]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, trajectory: int, block: Block) -> None:
        """Keep a block, in place of the oldest ones where there is no room."""
        if self.bytes_max is not None and block.nbytes > self.bytes_max:
            return
        self.remove(trajectory)
        self._blocks[trajectory] = (block, raw(block))
        self.n_bytes += block.nbytes
        while self.bytes_max is not None and self.n_bytes > self.bytes_max:
            _, (oldest, _) = self._blocks.popitem(last=False)
            self.n_bytes -= oldest.nbytes

    def block(self, trajectory: int) -> Block | None:
        found = self._blocks.get(trajectory)
        return found[0] if found else None

    def bytes_of(self, trajectory: int) -> memoryview | None:
        """The block as bytes."""
        found = self._blocks.get(trajectory)
        return found[1] if found else None

    def remove(self, trajectory: int) -> None:
        found = self._blocks.pop(trajectory, None)
        if found:
            self.n_bytes -= found[0].nbytes


def raw(block: Block) -> memoryview:
    """The bytes of a block, without a copy."""
    return block.view("u1").data
