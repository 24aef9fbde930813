"""How long studies take: estimates that start from what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from study_data import planned, settings, write_images

from fedaux.reproduce import command, costs
from fedaux.reproduce.running import Request
from fedaux.reproduce.studies import STUDIES
from fedaux.reproduce.study import narrowed

pytest.importorskip("pyarrow")
TABLE2_ROUND = {"participation_rate": 0.4, "split.num_clients": 40, "prototypes": [{"model": "resnet8"}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def test_the_estimate_starts_from_the_measured_rounds() -> None:
    settings = {"participation_rate": 0.4, "split.num_clients": 20, "prototypes": [{"model": "resnet8"}]}
    assert costs.round_seconds("fedaux", settings, 100_000) == pytest.approx(1.32, rel=0.03)
    assert costs.round_seconds("fedavg", settings, 100_000) == pytest.approx(0.19, rel=0.03)
    mobile = {"participation_rate": 0.4, "split.num_clients": 100, "prototypes": [{"model": "mobilenetv2"}]}
    assert costs.round_seconds("fedaux", mobile, 100_000) == pytest.approx(7.9, rel=0.03)
    shuffle = mobile | {"prototypes": [{"model": "shufflenet"}]}
    assert costs.round_seconds("fedaux", shuffle, 100_000) == pytest.approx(9.5, rel=0.03)
    both = mobile | {"prototypes": [{"model": "mobilenetv2"}, {"model": "resnet8"}]}
    small = mobile | {"prototypes": [{"model": "resnet8"}]}
    alone = [costs.round_seconds("fedavg", each, 100_000) - 0.04 for each in (mobile, small | {"mode": "full"})]
    assert costs.round_seconds("fedavg", both, 100_000) == pytest.approx(0.04 + (alone[0] + alone[1] + 0.02) / 2)
    cell = 100 * costs.round_seconds("fedaux", settings, 100_000)
    assert 162 * 35 < (costs.estimate(STUDIES["table1"]) or 0) < 162 * 2.5 * cell
    assert costs.estimate(STUDIES["nlp"]) is None
    times = {name: time for name, _, _, time, _ in command.listing()}
    # Features of 160,000 images in single precision; 6 values of alpha, 100 rounds, 2 methods of 4 distill.
    assert costs.estimate(STUDIES["linear"]) == pytest.approx(160_000 / 190 + 600 * (2 * 0.2 + 2 * 1.9))
    assert times["linear"] == "h0, then about 0.9 h on one core"
    assert times["nlp"] == "not measured"


def test_a_part_s_time_is_estimated_from_the_data_that_is_there(root: Path, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "h0.safetensors").touch()
    only = ["alpha=0.01", "auxiliary=[Dogs,Noise]", "method=fedaux"]
    cells = settings(planned("table2", root, only=only, seeds=2, overrides=["rounds=10"]))
    a_round = {size: costs.round_seconds("fedaux", TABLE2_ROUND, size) for size in (3, 100_000)}
    h0 = 2 * 100 * costs.PRETRAINING["resnet8"] * 100_003
    assert costs.estimate_runs(cells) == pytest.approx(2 * 10 * sum(a_round.values()) + h0)
    given = settings(
        planned("table2", root, only=only, seeds=2, overrides=["rounds=10", f"pretraining.checkpoint={checkpoint}"])
    )
    assert costs.estimate_runs(given) == pytest.approx(2 * 10 * sum(a_round.values()))
    request = Request(root / "out", data_root=root, only=only, overrides=["rounds=10"])
    assert command.part_line("table2", request) == "table2: 6 runs, 60 rounds; on an H200 about 7 min, an estimate"
    whole = planned("table2", root, only=["auxiliary=STL-10"], auxiliary="noise")
    assert costs.estimate_runs(settings(whole)) == pytest.approx(
        costs.estimate(replace(STUDIES["table2"], grid=narrowed(STUDIES["table2"].grid, ["auxiliary=STL-10"]).grid))
    )


def test_heads_alone_are_estimated_by_one_core(root: Path, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "h0.safetensors").touch()
    only = ["alpha=0.01", "C=[0.4,0.8]", "method=[fedavg+p,fedaux,fedbe+p]"]
    asked: dict[str, Any] = {"auxiliary": "noise", "seeds": 2, "only": only}
    heads, given = ["mode=linear", "rounds=10"], f"pretraining.checkpoint={checkpoint}"
    trained = 3 * (0.2 + 0.4)  # seconds for 20,000 and 40,000 examples
    distilled = 2 * 1.2 * (8 + 16) / 32 + 2 * 1.2 * 11 / 32 + 4 * 0.5  # 8 and 16 heads, and 11 more of FedBE's
    for overrides, features, share in (
        ([given], 160_000 / 190, 1.0),
        ([given, "engine.precision=bf16"], 160_000 / 480, 1.0),
        ([given, "auxiliary.size=40000"], 100_000 / 190, 0.4),
        ([], 2 * 160_000 / 190, 1.0),  # each seed has an h0 of its own
    ):
        runs = settings(planned("table1", root, overrides=[*heads, *overrides], **asked))
        assert costs.estimate_runs(runs) == pytest.approx(features + 2 * 10 * (trained + share * distilled))
    request = Request(root / "out", data_root=root, overrides=[*heads, given], **asked)
    assert command.part_line("table1", request) == "table1: 12 runs, 120 rounds; on one core about 16 min, an estimate"
    without = replace(request, overrides=heads)
    assert command.part_line("table1", without).endswith("rounds; h0, then on one core about 0.5 h, an estimate")
    whole = settings(planned("linear", root, auxiliary="noise"))
    assert costs.estimate_runs(whole) == pytest.approx(costs.estimate(STUDIES["linear"]))


def test_what_was_not_measured_has_no_time() -> None:
    text = tiny(text={"length": 16}, prototypes=[{"name": "bert", "model": "bert"}])
    assert costs.said_of([tiny(), text]) == "their time has not been measured"
