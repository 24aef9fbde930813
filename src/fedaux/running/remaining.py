"""The expected remaining time of rounds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping


class RemainingTime:
    """Estimates the rest of some rounds by the mean time of each method's rounds.

    Only rounds count: neither h0 nor features nor what else precedes them. Several cells of a sweep
    may run at once, each with a name.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[str, float] = {}
        self._spent: dict[str, list[float]] = defaultdict(list)

    def phase(self, round: int, *, cell: str = "") -> None:
        """Note that a phase of a round begins; round 0 is the preparation."""
        if round == 0 or cell not in self._began:
            self._began[cell] = self._clock()

    def round(self, method: str, *, cell: str = "") -> None:
        """Note that a round of a method has ended."""
        now = self._clock()
        self._spent[method].append(now - self._began.get(cell, now))
        self._began[cell] = now

    def text(self, left: Mapping[str, int], *, at_once: int = 1) -> str:
        """Return `, ETA ...` for the rounds left of each method, at first for those that have
        begun."""
        known = {
            method: sum(spent) / len(spent) * left[method]
            for method, spent in self._spent.items()
            if left.get(method)
        }
        if not known:
            return ""
        rest = sum(rounds > 0 for rounds in left.values()) - len(known)
        which = f" without {rest} method{'s' if rest > 1 else ''} to come" if rest else ""
        return f", ETA {duration(sum(known.values()) / at_once)}{which}"


def duration(seconds: float) -> str:
    """Return a time in s, min or h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
