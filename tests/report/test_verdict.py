"""Comparisons and sentences from constructed results."""

from __future__ import annotations

import pytest
import torch

from fedaux.core.metrics import information
from fedaux.report.public_weight import concentration_warnings, most, spreads
from fedaux.report.run import Run
from fedaux.report.verdict import Accuracies, last_accuracies, verdict
from fedaux.report.warnings import warnings_of


def seeds(*accuracies: float) -> dict[int, float]:
    return dict(enumerate(accuracies))


FULL = {
    "fedavg+p": seeds(0.60, 0.62, 0.58),
    "feddf+p": seeds(0.70, 0.73, 0.67),
    "fedaux": seeds(0.80, 0.83, 0.80),
    "local-only+p": seeds(0.20, 0.21, 0.19),
    "pooled+p": seeds(0.95, 0.95, 0.95),
}


def cell(accuracies: Accuracies, **settings: int) -> str:
    """Return the one difference of two methods."""
    table = verdict(accuracies, **settings)
    assert table is not None
    ((_, found),) = table.rows
    return str(found)


def test_every_pair_is_compared() -> None:
    """Differences by hand: 10, 10, 13; 20, 21, 22; 10, 11, 9; standard error is s / sqrt(3)."""
    table = verdict(FULL)
    assert table is not None
    assert table.headers == [
        "",
        "fedaux 81.0",
        "feddf+p 70.0",
        "fedavg+p 60.0",
        "local-only+p 20.0",
    ]
    assert table.rows == [
        ["pooled+p 95.0", "+14.0 ± 1.0", "+25.0 ± 1.7", "+35.0 ± 1.2", "+75.0 ± 0.6"],
        ["fedaux 81.0", "", "+11.0 ± 1.0", "+21.0 ± 0.6", "+61.0 ± 0.6"],
        ["feddf+p 70.0", "", "", "+10.0 ± 0.6", "+50.0 ± 1.2"],
        ["fedavg+p 60.0", "", "", "", "+40.0 ± 0.6"],
    ]
    assert len(table.bold) == 10  # no tie


def test_differences_within_the_standard_error_are_ties() -> None:
    """Differences 3, -1, 0: mean 0.7, standard error 1.2."""
    tied = {"fedaux": seeds(0.73, 0.69, 0.70), "feddf+p": seeds(0.70, 0.70, 0.70)}
    assert cell(tied) == "+0.7 ± 1.2 (tie)"
    table = verdict(tied)
    assert table is not None
    assert not table.bold
    assert cell({name: seeds(0.7, 0.6) for name in ("feddf", "fedavg")}) == "+0.0 ± 0.0 (tie)"


@pytest.mark.parametrize(("second", "shown"), [(0.705, "+0.5 (tie)"), (0.715, "+1.5")])
def test_with_one_seed_less_than_a_point_is_a_tie(second: float, shown: str) -> None:
    assert cell({"fedaux": seeds(second), "feddf+p": seeds(0.7)}) == shown


def test_methods_are_compared_over_common_seeds() -> None:
    assert cell({"fedaux": {0: 0.8, 1: 0.9}, "feddf+p": {1: 0.7, 2: 0.1}}) == "+20.0"
    assert cell({"fedaux": {0: 0.8}, "feddf+p": {1: 0.7}}) == ""
    assert verdict({"fedavg": seeds(0.5)}) is verdict({}) is None


def test_what_few_test_examples_cannot_tell_apart_is_a_tie() -> None:
    """sqrt((0.29 * 0.71 + 0.26 * 0.74) / 2 / 200) is 3.2 points."""
    found = {"fedaux": seeds(0.29), "fedavg+p": seeds(0.26)}
    assert cell(found, test_examples=2000) == "+3.0"
    assert cell(found, test_examples=200) == "+3.0 (tie)"


def test_of_many_methods_the_most_accurate_are_compared() -> None:
    table = verdict({f"own{number}": seeds(number / 20) for number in range(12)})
    assert table is not None
    assert table.rows[0][0] == "own11 55.0"
    assert len(table.rows) == 7


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


@pytest.mark.parametrize(
    ("public", "test", "warned"), [(0.05, 0.4, True), (0.2, 0.4, False), (0.001, 0.05, False)]
)
def test_public_data_that_tell_little_are_warned_of(
    public: float, test: float, warned: bool
) -> None:
    row = {"method": "fedaux2", "seed": 0, "round": 1, "clients_dropped": {}}
    rows = [row, row | {"round": 2, "information": {"public": public, "test": test}}]
    rows[0] = row | {"public_weight_by_class": [0.5, 0.5], "public_weight_by_client": {}}
    lines = warnings_of(Run("run", "", {"method": "fedaux2"}, {}, rows, {}, {}, {}, None))
    assert [line[:39] for line in lines] == ["fedaux2: the public data are unlike the"] * warned


def test_seeds_without_distillation_are_named() -> None:
    told = {"method": "fedaux2", "round": 1, "clients_dropped": {}}
    told |= {"information": {"public": 0.2, "test": 0.4}}
    taught = {"public_weight_by_class": [0.5, 0.5], "public_weight_by_client": {}}
    rows = [told | {"seed": 0}, told | {"seed": 1} | taught, told | {"seed": 2, "model_kept": True}]
    lines = warnings_of(Run("run", "", {"method": "fedaux2"}, {}, rows, {}, {}, {}, None))
    assert [line[:40] for line in lines if "distilled" in line] == [
        "fedaux2, seed 0: nothing was distilled, "
    ]


def test_information_is_none_for_equal_predictions_and_all_for_sure_ones() -> None:
    assert information(torch.full((5, 4), 0.25)) == pytest.approx(0.0)
    assert information(torch.tensor([[0.7, 0.3]] * 3)) == pytest.approx(0.0, abs=1e-6)
    assert information(torch.eye(4)) == pytest.approx(1.0)
    halves = information(torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]))
    assert halves == pytest.approx(0.5)
