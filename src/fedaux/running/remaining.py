"""The expected remaining time of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable


class RemainingTime:
    """Estimates the rest of some rounds by the mean of the rounds since it was first asked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def text(self, done: int, total: int) -> str:
        """Return `, ETA ...`; nothing before a round has ended."""
        if self._first is None:
            self._first = self._last = done, self._clock()
        if done > self._last[0]:
            self._last = done, self._clock()
        rounds, seconds = (now - then for now, then in zip(self._last, self._first, strict=True))
        if not rounds or done >= total:
            return ""
        return f", ETA {_duration(seconds / rounds * (total - done))}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
