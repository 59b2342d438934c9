"""How long a coroutine holds the event loop between two waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Steps(Generic[T]):
    """``await Steps(coroutine, held)`` is ``await coroutine``; ``held`` is told the seconds of each step."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], held: Callable[[float], None]) -> None:
        self._coroutine, self._held = coroutine, held

    def __await__(self) -> Generator[Any, Any, T]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            started = time.perf_counter()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._held(time.perf_counter() - started)
            try:
                sent = yield waits_for
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
