"""Who has been silent too long? Pure; the clock is given."""

from __future__ import annotations


class Silence:
    """Judges silence by what could have been heard.

    When we ourselves did not listen (a blocked event loop, a full mailbox), that time counts for nobody: a process
    that was stopped for a minute must read what waits in its socket before it declares everyone else dead.
    """

    def __init__(self, heartbeat_seconds: float, silence_seconds_max: float) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds_max = silence_seconds_max
        self._heard: dict[bytes, float] = {}
        self._last_tick: float | None = None

    def heard(self, key: bytes, now: float) -> None:
        self._heard[key] = now

    def forget(self, key: bytes) -> None:
        self._heard.pop(key, None)

    def tick(self, now: float, deaf: bool = False) -> list[bytes]:
        """Call once per heartbeat. ``deaf``: we did not listen since the last tick. Returns who was silent too long."""
        if self._last_tick is not None:
            elapsed = now - self._last_tick
            late = elapsed - self._heartbeat_seconds if elapsed > 2 * self._heartbeat_seconds else 0.0
            excused = elapsed if deaf else late
            if excused > 0:
                for key, at in self._heard.items():
                    self._heard[key] = min(now, at + excused)
        self._last_tick = now
        return [key for key, at in self._heard.items() if now - at > self._silence_seconds_max]
