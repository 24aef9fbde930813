"""The expected remaining time of rounds."""

from __future__ import annotations

from helpers.experiments import tiny

from fedaux.running.remaining import RemainingTime
from fedaux.sweep.display import rounds_left


def test_the_rest_is_estimated_by_the_rounds_of_each_method() -> None:
    now = 100.0
    remaining = RemainingTime(clock=lambda: now)
    assert remaining.text({"fedavg": 3, "fedaux2": 3}) == ""
    remaining.phase(0)
    now += 1000.0  # features are computed
    remaining.phase(0)
    remaining.phase(1)
    now += 5.0
    remaining.phase(1)
    now += 5.0
    remaining.round("fedavg")
    assert remaining.text({"fedavg": 2, "fedaux2": 3}) == ", ETA 20 s without 1 method to come"
    remaining.phase(0)
    remaining.phase(1)
    now += 60.0
    remaining.round("fedaux2")
    assert remaining.text({"fedavg": 2, "fedaux2": 2}) == ", ETA 2 min"
    assert remaining.text({"fedavg": 2, "fedaux2": 2}, at_once=2) == ", ETA 70 s"
    assert remaining.text({"fedavg": 0, "fedaux2": 0}) == ""


def test_cells_of_a_sweep_have_clocks_of_their_own() -> None:
    now = 0.0
    remaining = RemainingTime(clock=lambda: now)
    remaining.phase(1, cell="a")
    now += 8.0
    remaining.phase(1, cell="b")
    now += 2.0
    remaining.round("fedavg", cell="a")
    remaining.round("fedavg", cell="b")
    assert remaining.text({"fedavg": 5}) == ", ETA 30 s"


def test_rounds_are_done_in_the_order_of_a_run() -> None:
    experiment = tiny(method=["fedavg", "feddf"], seeds=[0, 1], rounds=4)
    assert rounds_left(experiment, done=7) == {"fedavg": 4, "feddf": 5}
