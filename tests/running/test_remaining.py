"""The expected remaining time of rounds."""

from __future__ import annotations

from fedaux.running.remaining import RemainingTime


def test_the_rest_is_estimated_by_the_rounds_that_were_seen() -> None:
    now = 100.0
    remaining = RemainingTime(clock=lambda: now)
    assert remaining.text(4, 100) == ""  # four rounds of an interrupted run cost nothing now
    now += 5.0
    assert remaining.text(4, 100) == ""
    now += 5.0
    assert remaining.text(6, 100) == f", ETA {94 * 5 / 60:.0f} min"
    now += 3.0  # amid a round
    assert remaining.text(6, 10) == ", ETA 20 s"
    assert remaining.text(10, 10) == ""
