"""The expected remaining time of runs, from what each method has cost so far."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedaux.config import Experiment


@dataclass(frozen=True)
class _Position:
    """Where a run is: its method and seed, the round that goes on (0: the preparation), and when
    that began."""

    method: str
    seed: int
    round: int
    began: float


class RemainingTime:
    """Estimates the rest of some runs, which have names.

    A method costs its preparation, once per seed, and its rounds: means of what was seen of it, for
    rounds the median. A run goes through its seeds and, for each, through its methods.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._preparations: dict[str, list[float]] = {}
        self._rounds: dict[str, list[float]] = {}
        self._positions: dict[str, _Position] = {}

    def phase(self, run: str, method: str, seed: int, round: int) -> None:
        """Record that a phase of a round begins; round 0 is the preparation."""
        now, last = self._clock(), self._positions.get(run)
        if last is None or (last.method, last.seed) != (method, seed):
            self._positions[run] = _Position(method, seed, round, now)
        elif last.round == 0 < round:
            self._preparations.setdefault(method, []).append(now - last.began)
            self._positions[run] = _Position(method, seed, round, now)

    def round(self, run: str, method: str, seed: int, round: int) -> None:
        """Record that a round has ended."""
        self.phase(run, method, seed, round)
        now = self._clock()
        self._rounds.setdefault(method, []).append(now - self._positions[run].began)
        self._positions[run] = _Position(method, seed, round + 1, now)

    def text(self, runs: Mapping[str, tuple[Experiment, int]], *, at_once: int = 1) -> str:
        """Return `, ETA ...` of runs, of which some go on at once; if a method is left that was
        not seen, that of the current method of a single run, or nothing."""
        if seconds := self.of_all(runs):
            return f", ETA {_duration(seconds / at_once)}"
        for run, (experiment, _) in runs.items() if len(runs) == 1 else ():
            if seconds := self.of_method(run, experiment):
                return f", ETA of this method and seed {_duration(seconds)}"
        return ""

    def of_method(self, run: str, experiment: Experiment) -> float | None:
        """Return the seconds left of a run's current method and seed; None if unknown."""
        if (now := self._positions.get(run)) is None or not now.round:
            return None
        return self._cost(now.method, experiment.rounds - now.round + 1, prepared=True)

    def of_all(self, runs: Mapping[str, tuple[Experiment, int]]) -> float | None:
        """Return the seconds left of runs, given with the number of their finished rounds, one
        after another; None if a method that is left has not been seen."""
        costs = [self._of_run(run, *about) for run, about in runs.items()]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    def _of_run(self, run: str, experiment: Experiment, done: int) -> float | None:
        tasks = [(method, seed) for seed in experiment.seeds for method in experiment.method]
        rest, costs = tasks, list[float | None]()
        if (now := self._positions.get(run)) is not None:
            place = tasks.index((now.method, now.seed)) + bool(now.round)
            rest = tasks[place:]
            done -= place * experiment.rounds
            if now.round:
                done += experiment.rounds - now.round + 1
                costs.append(self.of_method(run, experiment))
            elif seen := self._preparations.get(now.method):
                costs.append(-min(statistics.fmean(seen), self._clock() - now.began))
        for method, _ in rest:
            before = done / len(rest)  # a run that is extended has as many of each
            costs.append(self._cost(method, experiment.rounds - before, prepared=before > 0))
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    def _cost(self, method: str, rounds: float, *, prepared: bool) -> float | None:
        if rounds <= 0:
            return 0.0
        if method not in self._rounds or not (prepared or method in self._preparations):
            return None
        start = 0.0 if prepared else statistics.fmean(self._preparations[method])
        return start + rounds * statistics.median(self._rounds[method])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
