"""Sentences from constructed results."""

from __future__ import annotations

import pytest

from fedaux.core.algorithms import METHODS
from fedaux.core.algorithms.fedaux import FedAux
from fedaux.report.public_weight import concentration_warnings, most, spreads
from fedaux.report.verdict import last_accuracies, verdict


def seeds(*accuracies: float) -> dict[int, float]:
    return dict(enumerate(accuracies))


FULL = {
    "fedavg+p": seeds(0.60, 0.62, 0.58),
    "feddf+p": seeds(0.70, 0.73, 0.67),
    "fedaux": seeds(0.80, 0.83, 0.80),
    "local-only+p": seeds(0.20, 0.21, 0.19),
    "pooled+p": seeds(0.95, 0.95, 0.95),
}


def test_all_parts_are_judged() -> None:
    """Differences by hand: 10, 10, 13; 20, 21, 22; 10, 11, 9; standard error is s / sqrt(3)."""
    assert verdict(FULL) == [
        "Weighting clients by their scores adds 11.0 ± 1.0 points over equal weights "
        "(fedaux 81.0 %, feddf+p 70.0 %).",
        "Distillation with scores adds 21.0 ± 0.6 points over averaging alone (fedaux 81.0 %, "
        "fedavg+p 60.0 %); feddf+p is 10.0 ± 0.6 points above fedavg+p.",
        "fedaux (81.0 %) is 61.0 ± 0.6 points above training alone (local-only+p, 20.0 %) and is "
        "14.0 ± 1.0 points below training on pooled data (pooled+p, 95.0 %).",
    ]


def test_differences_within_the_standard_error_are_ties() -> None:
    """Differences 3, -1, 0: mean 0.7, standard error 1.2."""
    tied = {"fedaux": seeds(0.73, 0.69, 0.70), "feddf+p": seeds(0.70, 0.70, 0.70)}
    assert verdict(tied) == [
        "Weighting clients by their scores ties with equal weights, +0.7 ± 1.2 points (fedaux "
        "70.7 %, feddf+p 70.0 %)."
    ]
    lost = {"fedaux": seeds(0.68, 0.68, 0.67), "feddf+p": seeds(0.70, 0.70, 0.70)}
    assert verdict(lost)[0].startswith(
        "Weighting clients by their scores loses 2.3 ± 0.3 points against equal weights"
    )
    equal = {name: seeds(0.7, 0.6) for name in ("feddf", "fedavg", "pooled")}
    assert verdict(equal) == [
        "Distillation ties with averaging alone, +0.0 ± 0.0 points (feddf 65.0 %, fedavg 65.0 %).",
        "feddf (65.0 %) ties with training on pooled data (pooled, 65.0 %), +0.0 ± 0.0 points.",
    ]


@pytest.mark.parametrize(("second", "tie"), [(0.705, True), (0.715, False)])
def test_with_one_seed_less_than_a_point_is_a_tie(second: float, tie: bool) -> None:
    (line,) = verdict({"fedaux": seeds(second), "feddf+p": seeds(0.7)})
    assert ("ties with" in line) == tie
    assert "points (one seed)" in line


def test_methods_are_compared_over_common_seeds_and_from_the_same_start() -> None:
    (line,) = verdict({"fedaux": {0: 0.8, 1: 0.9}, "feddf+p": {1: 0.7, 2: 0.1}})
    assert line == (
        "Weighting clients by their scores adds 20.0 points (one seed) over equal weights (fedaux "
        "90.0 %, feddf+p 70.0 %)."
    )
    assert verdict({"fedaux": {0: 0.8}, "feddf+p": {1: 0.7}}) == []
    (line,) = verdict({"fedaux": seeds(0.8), "feddf": seeds(0.3), "fedavg": seeds(0.5)})
    assert line.startswith("fedaux is 30.0 points (one seed) above fedavg, the best method that")
    assert verdict({"fedavg": seeds(0.5)}) == verdict({}) == verdict({"unheard of": seeds(1)}) == []


def test_without_equal_weights_distillation_is_judged_with_scores() -> None:
    found = verdict({"fedaux": seeds(0.8), "fedavg+p": seeds(0.5), "local-only": seeds(0.2)})
    assert found == [
        "Distillation with scores adds 30.0 points (one seed) over averaging alone (fedaux 80.0 %, "
        "fedavg+p 50.0 %).",
        "fedaux (80.0 %) is 60.0 points (one seed) above training alone (local-only, 20.0 %).",
    ]


def test_a_method_that_differs_in_more_than_its_scores_is_not_their_merit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = FedAux("own", objectives=("proximal",))
    monkeypatch.setitem(METHODS, "own", own)
    found = verdict({"own": seeds(0.9, 0.9), "feddf+p": seeds(0.8, 0.8), "feddf": seeds(0.9, 0.9)})
    assert found == [
        "own is 10.0 ± 0.0 points above feddf+p, the nearest method with equal weights (own "
        "90.0 %, feddf+p 80.0 %)."
    ]


def test_the_rival_is_the_best_method_that_averages_clients() -> None:
    """Not one that averages nothing, though it starts as fedaux2 does."""
    found = {"fedaux2": seeds(0.375), "fedavg+p": seeds(0.45), "private-head": seeds(0.325)}
    assert verdict(found | {"fedavg": seeds(0.2)}) == [
        "fedaux2 is 7.5 points (one seed) below fedavg+p, the best method that only averages "
        "(fedaux2 37.5 %, fedavg+p 45.0 %)."
    ]


def test_what_few_test_examples_cannot_tell_apart_is_a_tie() -> None:
    """sqrt((0.29 * 0.71 + 0.26 * 0.74) / 2 / 200) is 3.2 points."""
    found = {"fedaux": seeds(0.29), "fedavg+p": seeds(0.26)}
    assert "adds 3.0 points" in verdict(found, test_examples=2000)[0]
    assert verdict(found, test_examples=200)[0] == (
        "Distillation with scores ties with averaging alone, +3.0 points (one seed), less than the "
        "3.2 that 200 test examples can resolve (fedaux 29.0 %, fedavg+p 26.0 %)."
    )
    near = {"fedaux": seeds(0.305, 0.295), "fedavg+p": seeds(0.285, 0.295)}
    assert "+1.0 ± 1.0 points (" in verdict(near, test_examples=200)[0]  # the seeds decide


def test_the_last_measured_round_counts() -> None:
    rows = [
        {"method": "fedavg", "seed": 1, "round": number, "accuracy": accuracy}
        for number, accuracy in ((3, None), (2, 0.5), (1, 0.9))
    ]
    assert last_accuracies(rows) == {"fedavg": {1: 0.5}}


def row(
    clients: dict[str, float], classes: list[float], *, seed: int = 0, method: str = "fedaux"
) -> dict[str, object]:
    return {
        "method": method,
        "seed": seed,
        "public_weight_by_client": clients,
        "public_weight_by_class": classes,
    }


def test_weights_are_means_over_the_rounds_a_client_teaches() -> None:
    rows = [row({"0": 0.2, "3": 0.8}, [0.1, 0.9]), row({"3": 0.4, "5": 0.6}, [0.5, 0.5])]
    found = spreads([*rows, {"method": "fedavg", "seed": 0}])
    assert list(found) == [("fedaux", 0)]
    assert found["fedaux", 0].by_client == {0: 0.2, 3: pytest.approx(0.6), 5: 0.6}
    assert found["fedaux", 0].by_class == pytest.approx([0.3, 0.7])
    assert found["fedaux", 0].teachers == 2


def test_a_client_or_class_with_most_of_the_weight_is_named() -> None:
    even = {str(client): 0.25 for client in range(4)}
    flat = [0.2] * 5
    greedy = {"0": 0.1, "1": 0.7, "2": 0.1, "3": 0.1}
    classes, names = ["cat", "dog", "elk", "fox", "gnu"], ("a", "b", "c", "d")
    assert concentration_warnings([row(even, flat)], classes, names) == []
    assert concentration_warnings([row(greedy, flat)], classes, names) == [
        "fedaux, seed 0: b has 70 % of the weight on public data in the rounds it teaches (equal "
        "weights: 25 %), so the other clients hardly teach"
    ]
    lopsided = [row(even, [0.6, 0.1, 0.1, 0.1, 0.1]), row(even, [0, 0, 0.9, 0.1, 0], seed=1)]
    assert concentration_warnings(lopsided, classes, ()) == [
        "fedaux, seed 1: class elk has 90 % of the soft labels on public data (equal shares: "
        "20 %), so the server learns little of the others"
    ]
    assert "client 1 has 70 %" in concentration_warnings([row(greedy, flat)], [], ())[0]
    assert concentration_warnings([row({"4": 1.0}, flat)], classes, ()) == []  # it teaches alone
    assert [most(count) for count in (2, 3, 4, 10)] == [0.9, pytest.approx(2 / 3), 0.5, 0.5]
