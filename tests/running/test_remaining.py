"""The expected remaining time of runs."""

from __future__ import annotations

from helpers.experiments import tiny

from fedaux.running.remaining import RemainingTime

PREPARATION = {"private-head": 9.0, "fedavg": 1.0, "fedaux2": 4.0}
ROUND = {"private-head": 0.25, "fedavg": 2.0, "fedaux2": 20.0}
EXPERIMENT = tiny(method=list(ROUND), seeds=[0, 1], rounds=5)


class Played:
    """A run whose preparations and rounds take the times above."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self.remaining = RemainingTime(clock=lambda: self.now)

    def prepare(self, method: str, seed: int) -> None:
        self.remaining.phase("", method, seed, 0)
        self.now += PREPARATION[method]

    def rounds(self, method: str, seed: int, numbers: range) -> None:
        for number in numbers:
            self.remaining.phase("", method, seed, number)
            self.now += ROUND[method]
            self.remaining.round("", method, seed, number)
            self.done += 1

    def text(self) -> str:
        return self.remaining.text({"": (EXPERIMENT, self.done)})


def test_the_estimate_is_right_for_methods_of_different_costs() -> None:
    run = Played()
    total = 2 * sum(PREPARATION[method] + 5 * ROUND[method] for method in ROUND)
    assert run.text() == ""
    for method in EXPERIMENT.method:
        run.prepare(method, 0)
        assert run.text() == "", "a preparation that has not been seen"
        run.rounds(method, 0, range(1, 4))
        if method != "fedaux2":
            left = f"{2 * ROUND[method]:.0f} s"
            assert run.text() == f", ETA of this method and seed {left}"
            run.rounds(method, 0, range(4, 6))
    assert run.text() == f", ETA {(total - run.now) / 60:.0f} min"
    run.rounds("fedaux2", 0, range(4, 6))
    for method in EXPERIMENT.method:
        run.prepare(method, 1)
        assert run.remaining.of_all({"": (EXPERIMENT, run.done)}) == total - run.now
        run.rounds(method, 1, range(1, 6))
        assert run.remaining.of_all({"": (EXPERIMENT, run.done)}) == total - run.now
    assert run.text() == ""


def test_an_extended_run_needs_no_preparation() -> None:
    run = Played()
    run.done = 4 * 6  # four of five rounds of each method and seed are done
    for method in EXPERIMENT.method:
        run.rounds(method, 0, range(5, 6))
    assert run.remaining.of_all({"": (EXPERIMENT, run.done)}) == sum(ROUND.values())


def test_cells_that_go_on_at_once_share_the_rest() -> None:
    run = Played()
    for method in EXPERIMENT.method:
        run.prepare(method, 0)
        run.rounds(method, 0, range(1, 6))
    rest = {"": (EXPERIMENT, 15), "waiting": (EXPERIMENT, 0)}
    seed = sum(PREPARATION[method] + 5 * ROUND[method] for method in ROUND)
    assert run.remaining.of_all(rest) == seed * 3
    assert run.remaining.text(rest, at_once=2) == f", ETA {seed * 3 / 2 / 60:.0f} min"
