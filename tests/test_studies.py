"""Studies: their grids are the paper's, their data is found or named, their runs resume, words fit the numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import tiny
from latex_checks import check_latex

from fedaux import execute
from fedaux.config import Experiment, Local
from fedaux.reproduce import (
    EXPERIMENTS,
    command,
    comparison,
    costs,
    drawing,
    latex,
    page,
    places,
    presenting,
    published,
    running,
    tables,
)
from fedaux.reproduce.running import CENTRAL, Plan, Request, plan
from fedaux.reproduce.studies import STUDIES
from fedaux.reproduce.study import narrowed

SIX = [0.01, 0.04, 0.16, 0.64, 2.56, 10.24]
pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few examples of every set of images, each in one of the layouts that are understood."""
    import pyarrow.parquet
    import scipy.io

    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)

    def write(path: Path, *shape: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.integers(10, size=shape, dtype=np.uint8).tobytes())

    write(folder / "cifar10/cifar-10-batches-bin/data_batch_1.bin", 160, 3073)
    write(folder / "cifar-100-binary/train.bin", 120, 3074)
    write(folder / "stl10_binary/unlabeled_X.bin", 20, 3 * 96 * 96)
    (folder / "svhn").mkdir()
    pixels = generator.integers(255, size=(32, 32, 3, 9), dtype=np.uint8)
    scipy.io.savemat(folder / "svhn/train_32x32.mat", {"X": pixels, "y": np.ones((9, 1), dtype=np.uint8)})
    (folder / "tinyimagenet32/data").mkdir(parents=True)
    table = pyarrow.table({"image": [b""] * 3, "wnid": ["n02099601"] * 3})
    pyarrow.parquet.write_table(table, folder / "tinyimagenet32/data/train-00000-of-00001.parquet")
    return folder


def planned(name: str, root: Path, **options: Any) -> Plan:
    return plan(STUDIES[name], Request(root / "out", data_root=root, **options))


def settings(prepared: Plan) -> list[Experiment]:
    return [cell.experiment for cell in prepared.cells]


def test_every_table_and_figure_has_its_name() -> None:
    names = {row[0] for row in command.listing()}
    assert names == {
        *("table1", "table2", "table3", "cifar100", "nlp", "hpo", "architectures", "curves", "linear", "privacy"),
        *("split", "toy-iris", "toy-gaussians", "similar-images", "qualitative", "ensemble"),
    }
    assert all(all(row) for row in command.listing())


def test_what_all_image_studies_share_is_the_paper_s(root: Path) -> None:
    for name in ("table1", "table2", "table3", "cifar100", "architectures", "linear"):
        for experiment in settings(planned(name, root)):
            assert (experiment.local.optimizer, experiment.local.learning_rate) == ("adam", 1e-3)
            assert experiment.local.batch_size == 32
            assert experiment.local.epochs == (40 if name == "table3" else 1)
            distillation = experiment.distillation
            assert (distillation.optimizer, distillation.learning_rate) == ("adam", 5e-5)
            assert (distillation.batch_size, distillation.epochs) == (128, 1)
            assert (experiment.certainty.epsilon, experiment.certainty.delta) == (0.1, 1e-5)
            assert experiment.auxiliary.negatives_fraction == 0.2
            assert (experiment.pretraining.learning_rate, experiment.pretraining.batch_size) == (1e-3, 512)
            assert experiment.bayesian.samples == 10
            assert experiment.rounds == (1 if name == "table3" else 100)


def test_table1_is_the_paper_s_grid(root: Path) -> None:
    cells = settings(planned("table1", root))
    assert len(cells) == 9 * 2 * 3 * 3
    found = {(e.method[0], e.split.alpha, e.participation_rate, e.seeds[0]) for e in cells}
    methods = ["fedavg", "fedprox", "feddf", "fedbe", "fedavg+p", "fedprox+p", "feddf+p", "fedbe+p", "fedaux"]
    assert found == {(m, a, c, s) for m in methods for a in (0.01, 100.0) for c in (0.2, 0.4, 0.8) for s in (0, 1, 2)}
    assert {e.split.num_clients for e in cells} == {20}
    assert {e.prototypes[0].model for e in cells} == {"resnet8"}
    assert {(e.data.source, e.auxiliary.source, e.auxiliary.image_size) for e in cells} == {
        ("cifar10-binary", "stl10-binary", 32)
    }


def test_table2_has_eight_sets_of_public_data(root: Path) -> None:
    prepared = planned("table2", root)
    cells = settings(prepared)
    assert len(cells) == 3 * 2 * 8 * 3
    assert {(e.split.num_clients, e.participation_rate) for e in cells} == {(40, 0.4)}
    kinds = Counter((e.auxiliary.source, e.auxiliary.wordnet) for e in cells)
    subsets = [("parquet", name) for name in ("invertebrates", "birds", "devices", "dogs", "structures")]
    assert set(kinds) == {("stl10-binary", None), ("cifar100-binary", None), ("svhn", None), *subsets}
    assert set(kinds.values()) == {18}
    assert prepared.notes == ("Tiny-ImageNet stands in for ImageNet",)
    neighbours = [(e.auxiliary.source, e.auxiliary.path) for e in cells]
    changes = sum(one != other for one, other in pairwise(neighbours))
    assert changes == 3, "runs on the same data follow one another"


OURS = "auxiliary=[Tiny-ImageNet,Animals,Dogs,Noise]"


def test_table2_has_columns_of_ours_where_they_are_named(root: Path, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "h0.safetensors").touch()
    prepared = planned("table2", root, auxiliary="tinyimagenet32", only=["alpha=0.01", OURS], overrides=["rounds=10"])
    cells = settings(prepared)
    assert len(cells) == 3 * 4 * 3
    assert [value.label for value in prepared.grid.columns.values] == ["Dogs", "Animals", "Tiny-ImageNet", "Noise"]
    assert {e.rounds for e in cells} == {10}
    found = {(e.auxiliary.source, e.auxiliary.wordnet, e.auxiliary.size, e.auxiliary.path is None) for e in cells}
    read = {("parquet", name, None, False) for name in (None, "animals", "dogs")}
    assert found == {*read, ("noise", None, 100_000, True)}
    for place in prepared.places.values():
        assert (published.printed("table2", place.block, place.column, place.method) is None) == (
            place.column != "Dogs"
        )
    small = settings(planned("table2", root, only=["auxiliary=Noise"], overrides=["auxiliary.size=300"]))
    assert {e.auxiliary.size for e in small} == {300}
    one_h0 = settings(planned("table2", root, only=[OURS], overrides=[f"pretraining.checkpoint={checkpoint}"]))
    assert {e.pretraining.checkpoint for e in one_h0} == {str(checkpoint)}
    with pytest.raises(ValueError, match="STL-10 and Tiny-ImageNet read the same data; should be one of them"):
        planned("table2", root, auxiliary="tinyimagenet32", only=["auxiliary=[STL-10,Tiny-ImageNet]"])
    floor = planned("table1", root, auxiliary="noise")
    assert {(e.auxiliary.source, e.auxiliary.size) for e in settings(floor)} == {("noise", 100_000)}
    assert "noise stands in for STL-10" in floor.notes


def test_what_is_there_is_offered_where_columns_are_missing(tmp_path: Path, root: Path) -> None:
    for name in ("cifar10", "tinyimagenet32"):
        (tmp_path / name).symlink_to(root / name)
    with pytest.raises(ValueError, match="2 of 5 data sets missing") as error:
        plan(STUDIES["table2"], Request(tmp_path, data_root=tmp_path, auxiliary="tinyimagenet32"))
    left = "'auxiliary=[STL-10,Invertebrates,Birds,Devices,Dogs,Structures]'"
    assert str(error.value).endswith(f"What is there is enough for --only {left}")


def test_a_part_s_time_is_estimated_from_the_data_that_is_there(root: Path, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "h0.safetensors").touch()
    only = ["alpha=0.01", "auxiliary=[Dogs,Noise]", "method=fedaux"]
    cells = settings(planned("table2", root, only=only, seeds=2, overrides=["rounds=10"]))
    a_round = {size: costs.round_seconds("fedaux", TABLE2_ROUND, size) for size in (3, 100_000)}
    h0 = 2 * 100 * costs.PRETRAINING * 100_003
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


TABLE2_ROUND = {"participation_rate": 0.4, "split.num_clients": 40, "prototypes": [{"model": "resnet8"}]}


def test_table3_cifar100_and_linear_are_the_paper_s_grids(root: Path) -> None:
    one_shot = settings(planned("table3", root))
    assert len(one_shot) == 7 * 2 * 4 * 3
    assert {(e.split.num_clients, e.participation_rate) for e in one_shot} == {(100, 1.0)}
    assert {(e.prototypes[0].model, len(e.prototypes)) for e in one_shot} == {("mobilenetv2", 1), ("shufflenet", 1)}
    assert sorted({e.split.alpha for e in one_shot}) == [0.01, 0.04, 0.16, 10.24]
    many = settings(planned("cifar100", root))
    assert len(many) == 4 * 6
    assert {e.data.source for e in many} == {"cifar100-binary"}
    assert sorted({e.split.alpha for e in many}) == SIX
    linear = settings(planned("linear", root))
    assert {(e.mode, e.split.num_clients, e.participation_rate) for e in linear} == {("linear", 80, 0.4)}
    assert sorted({e.split.alpha for e in linear}) == SIX


def test_architectures_has_the_paper_s_populations_and_shares_its_runs_with_curves(root: Path) -> None:
    prepared = planned("architectures", root)
    federated = [cell for cell in prepared.cells if prepared.places[cell.name].method != CENTRAL]
    found = {
        (tuple(p.model for p in cell.experiment.prototypes), cell.experiment.split.num_clients) for cell in federated
    }
    three = ("resnet8", "mobilenetv2", "shufflenet")
    assert found == {(three[:1], 80), (three[1:2], 100), (three[2:], 100), (three, 60)}
    assert len(federated) == 3 * 4 * 6
    central = [cell.experiment for cell in prepared.cells if cell not in federated]
    assert [(e.split.num_clients, e.participation_rate, len(e.prototypes)) for e in central] == [(1, 1.0, 1)] * 3
    curves = {cell.name: cell.experiment.sha256() for cell in planned("curves", root).cells}
    assert curves == {cell.name: cell.experiment.sha256() for cell in federated}
    assert command.default_folder("curves", quick=False) == command.default_folder("architectures", quick=False)


def test_hpo_tunes_what_a_method_looks_at(root: Path) -> None:
    prepared = planned("hpo", root)
    counts = Counter(cell.experiment.method[0] for cell in prepared.cells)
    assert counts == {
        **dict.fromkeys(("fedavg", "fedavg+p"), 2 * 4),
        **dict.fromkeys(("fedprox", "fedprox+p", "feddf", "feddf+p", "fedbe", "fedaux"), 2 * 16),
    }
    rates = {1e-2, 1e-3, 1e-4, 1e-5}
    for experiment in settings(prepared):
        assert (experiment.rounds, experiment.split.num_clients, experiment.participation_rate) == (50, 20, 0.4)
        assert experiment.local.learning_rate in rates
    assert {e.distillation.learning_rate for e in settings(prepared) if e.method == ("fedaux",)} == rates
    assert {e.local.proximal for e in settings(prepared) if e.method == ("fedprox",)} == rates


def test_privacy_and_similar_images_have_the_paper_s_settings(root: Path) -> None:
    request = Request(root / "out", data_root=root)
    base, _ = command.base_of("privacy", EXPERIMENTS["privacy"], request, None)
    assert base is not None
    assert (base.rounds, base.split.num_clients, base.participation_rate, base.split.alpha) == (10, 40, 0.4, 0.01)
    grids = EXPERIMENTS["privacy"].options["grids"]
    assert {0.04, 0.1} <= set(grids["paper"]["epsilon"])
    assert 1e-6 in grids["paper"]["delta"]
    assert set(grids["paper"]["regularisation"]) == {0.01, 0.1}
    dogs, notes = command.base_of("similar-images", EXPERIMENTS["similar-images"], request, None)
    assert dogs is not None
    assert (dogs.auxiliary.wordnet, dogs.split.alpha) == ("dogs", 0.01)
    assert notes == ["Tiny-ImageNet stands in for ImageNet"]
    for name in ("split", "qualitative", "ensemble"):
        assert command.base_of(name, EXPERIMENTS[name], request, None)[0] is not None


def test_nlp_says_where_texts_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Path:
        raise ValueError(name)

    monkeypatch.setattr(running, "find_recipe", none)
    with pytest.raises(ValueError, match="not available, because this version of fedaux cannot read texts"):
        planned("nlp", root)
    assert "not in this version" in next(row[1] for row in command.listing() if row[0] == "nlp")


def test_another_set_takes_the_place_of_stl10(root: Path) -> None:
    prepared = planned("table1", root, auxiliary="tinyimagenet32", seeds=1)
    assert {e.auxiliary.source for e in settings(prepared)} == {"parquet"}
    assert prepared.notes[0] == "Tiny-ImageNet stands in for STL-10"
    with pytest.raises(ValueError, match="--aux imagenet: should be one of"):
        planned("table1", root, auxiliary="imagenet")


def test_missing_data_is_named_with_its_place(tmp_path: Path, root: Path) -> None:
    with pytest.raises(ValueError, match=r"--data-root: missing; CIFAR-10, STL-10 .* or give --quick"):
        plan(STUDIES["table1"], Request(tmp_path))
    with pytest.raises(ValueError, match="there is no such folder"):
        plan(STUDIES["table1"], Request(tmp_path, data_root=tmp_path / "nothing"))
    (tmp_path / "tinyimagenet32").mkdir()
    (tmp_path / "tinyimagenet32/train-0.parquet").touch()
    with pytest.raises(ValueError, match="2 of 2 data sets missing") as error:
        plan(STUDIES["table1"], Request(tmp_path, data_root=tmp_path))
    said = str(error.value)
    assert f"CIFAR-10: none of {tmp_path}/cifar10/train*.parquet, {tmp_path}/cifar10/data_batch_*.bin" in said
    assert "--aux tinyimagenet32 takes it instead" in said
    assert not (tmp_path / "cells").exists()


def test_the_hub_s_folders_a_configuration_are_found(tmp_path: Path) -> None:
    (tmp_path / "cifar10/plain_text").mkdir(parents=True)
    (tmp_path / "cifar10/plain_text/train-00000-of-00001.parquet").touch()
    found = places.locate(tmp_path, ["cifar10"])["cifar10"]
    assert (found.source, found.path) == ("parquet", (tmp_path / "cifar10/plain_text").resolve())
    unlabeled = tmp_path / "stl10/unlabeled-00000-of-00001.parquet"
    unlabeled.parent.mkdir()
    unlabeled.touch()
    assert places.locate(tmp_path, ["stl10"])["stl10"].path == unlabeled.parent.resolve()
    (tmp_path / "stl10/train-00000-of-00001.parquet").touch()
    assert places.locate(tmp_path, ["stl10"])["stl10"].path == unlabeled.resolve(), "not the labelled ones"


def test_a_part_can_be_asked_for(root: Path) -> None:
    prepared = planned(
        "table1", root, only=["alpha=0.01", "C=[0.4,0.8]", "method=[fedaux,fedavg]"], also=["fedaux+m"], seeds=2
    )
    whole = {cell.name for cell in planned("table1", root).cells}
    names = [cell.name for cell in prepared.cells]
    assert len(names) == 2 * 3 * 2
    assert {name for name in names if "fedaux+m" not in name} <= whole, "a part's runs count for the whole"
    for only, said in {
        "alpha=0.02": "there is no such value",
        "beta=1": "should be KEY=VALUE with one of alpha, C, method",
        "method=fedavgg": "did you mean fedavg",
        "method=fedaux+m": r"--also fedaux\+m adds it",
    }.items():
        with pytest.raises(ValueError, match=said):
            planned("table1", root, only=[only])
    with pytest.raises(ValueError, match="choose values with --only alpha="):
        planned("table1", root, overrides=["split.alpha=0.5"])
    with pytest.raises(ValueError, match="should be --seeds N"):
        planned("table1", root, overrides=["seeds=[1]"])


def test_mu_is_the_paper_s_for_each_method_and_alpha(root: Path) -> None:
    prepared = planned("table1", root, seeds=1)
    found = {(e.method[0], e.split.alpha): e.local.proximal for e in settings(prepared) if "prox" in e.method[0]}
    assert found == {
        **{("fedprox", 0.01): 0.01, ("fedprox", 100.0): 0.001},
        **{("fedprox+p", 0.01): 0.01, ("fedprox+p", 100.0): 0.0001},
    }
    assert {e.local.proximal for e in settings(prepared) if "prox" not in e.method[0]} == {Local().proximal}
    (note,) = prepared.notes
    assert "fedprox 0.01 at α = 0.01; fedprox+p 0.01 at α = 0.01; fedprox 0.001 at α = 100; fedprox+p 0.0001" in note
    linear = {e.split.alpha: e.local.proximal for e in settings(planned("linear", root)) if e.method == ("fedprox+p",)}
    assert linear == dict.fromkeys(SIX[:4], 0.01) | dict.fromkeys(SIX[4:], 0.0001)
    changed = planned("table1", root, overrides=["local.proximal=0.01"])
    assert {cell.experiment.local.proximal for cell in changed.cells} == {0.01}
    assert changed.notes == ()


def test_folders_from_before_mu_was_the_paper_s_can_be_gone_on_with(root: Path) -> None:
    before = {
        cell.name: cell.experiment.sha256() for cell in planned("table1", root, overrides=["local.proximal=0.01"]).cells
    }
    now = {cell.name: cell.experiment.sha256() for cell in planned("table1", root).cells}
    shared = before.keys() & now.keys()
    assert {name: before[name] for name in shared} == {name: now[name] for name in shared}, (
        "never another run of a name"
    )
    assert {name for name in now if name not in shared} == {
        f"alpha=100,C={c},method={method},seed={seed}".replace(",seed", f",mu={mu},seed")
        for c in ("0.2", "0.4", "0.8")
        for method, mu in (("fedprox", "0.001"), ("fedprox+p", "0.0001"))
        for seed in range(3)
    }


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "nlp"])
def test_quick_versions_keep_the_methods_and_say_what_is_cut(name: str, tmp_path: Path, root: Path) -> None:
    quick = plan(STUDIES[name], Request(tmp_path, quick=True))
    assert quick.methods == planned(name, root).methods
    assert quick.grid.cut
    assert len(quick.cells) <= 60
    assert all(cell.experiment.certainty.epsilon == 0.5 for cell in quick.cells)
    with pytest.raises(ValueError, match="public data of their own"):
        plan(STUDIES[name], Request(tmp_path, quick=True, auxiliary="tinyimagenet32"))


# From runs to tables

SMALL = ["rounds=2", "pretraining.epochs=1", "auxiliary.size=200", "engine.threads=1"]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, Any]]:
    out = tmp_path_factory.mktemp("table1")
    only = ["alpha=0.01", "C=0.4", "method=[fedavg,fedaux]"]
    outcome = command.reproduce("table1", Request(out, quick=True, only=only, overrides=SMALL))
    assert {file.suffix for file in outcome.files} == {".html", ".md", ".json", ".tex", ".png", ".svg"}
    assert check_latex((out / "table1.tex").read_text()) == [3]
    return out, outcome.numbers


def test_a_study_measures_what_its_runs_measured(small: tuple[Path, Mapping[str, Any]]) -> None:
    out, numbers = small
    rows = {row["method"]: row for row in numbers["rows"]}
    assert set(rows) == {"fedavg", "fedaux"}
    for method, row in rows.items():
        summary = json.loads((out / f"cells/alpha=0.01,C=0.4,method={method},seed=0/summary.json").read_text())["rows"][
            0
        ]
        assert row["best"]["mean"] == pytest.approx(100 * summary["accuracy_max_mean"], abs=1e-3)
        assert row["last"]["mean"] == pytest.approx(100 * summary["accuracy_mean"], abs=1e-3)
    text = (out / "table1.md").read_text()
    for row in rows.values():
        assert f"{row['best']['mean']:.1f}" in text
    assert "Cut for the quick version" in text
    assert "cannot be held against its own" in text


def test_finished_runs_are_not_run_again_and_more_can_be_added(small: tuple[Path, Mapping[str, Any]]) -> None:
    out, numbers = small
    stamps = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/summary.json")}
    assert len(stamps) == 2
    only = ["alpha=0.01", "C=0.4", "method=fedavg"]
    outcome = command.reproduce("table1", Request(out, quick=True, only=only, overrides=SMALL, seeds=2))
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    (row,) = outcome.numbers["rows"]
    (before,) = [other for other in numbers["rows"] if other["method"] == "fedavg"]
    assert row["best"]["values"][0] == before["best"]["values"][0]
    assert len(row["best"]["values"]) == 2
    assert "±" in outcome.markdown


def test_qualitative_counts_what_was_sent(tmp_path: Path) -> None:
    changes = ["rounds=1", "pretraining.epochs=1", "auxiliary.size=200", "engine.threads=1"]
    outcome = command.reproduce("qualitative", Request(tmp_path, quick=True, overrides=changes))
    columns = {(column["method"], column["phase"]): column for column in outcome.numbers["columns"]}
    assert list(columns) == [
        *(("fedavg", "a round"), ("feddf", "a round"), ("fedaux", "preparation"), ("fedaux", "a round"))
    ]
    ledger = json.loads((tmp_path / "run/ledger.json").read_text())["entries"]
    before = columns["fedaux", "preparation"]
    assert (before["epsilon"], before["delta"]) == (ledger[0]["epsilon"], ledger[0]["delta"]) == (0.5, 1e-5)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        column = columns[line["method"], "a round"]
        assert column["bytes_up"] * column["participants"] == pytest.approx(line["bytes_up"])
        assert column["bytes_up"] == outcome.numbers["model_bytes"], "a client sends one model"
    assert before["bytes_down"] == before["sent"]["extractor"] + before["sent"]["public"]
    # The network by hand: three convolutions on 8 x 8, 4 x 4 and 2 x 2 places, two operations a weight and place.
    weights = [(1 * 16 * 9, 64), (16 * 32 * 9, 16), (32 * 32 * 9, 4), (128 * 10, 1)]
    by_hand = sum(2 * number * places_ for number, places_ in weights)
    trained = columns["fedavg", "a round"]["clients"]
    assert trained["flops"] == pytest.approx(3 * by_hand * trained["examples trained"])
    assert trained["examples trained"] == 1438, "all clients, all examples, one epoch"
    assert columns["fedavg", "a round"]["server"]["flops"] == 0
    assert "0.5, 1e-05" in outcome.markdown
    assert check_latex((tmp_path / "qualitative.tex").read_text()) == [5]


def test_split_becomes_even_with_alpha(tmp_path: Path) -> None:
    outcome = command.reproduce("split", Request(tmp_path, quick=True))
    rows = outcome.numbers["rows"]
    shares = [row["share_of_main_class"] for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert shares[-1] < 0.15
    for table in outcome.numbers["tables"].values():
        assert np.array(table).shape == (20, 10)
        assert np.array(table).sum() == 1438
    assert check_latex((tmp_path / "split.tex").read_text()) == [4]


@pytest.mark.parametrize("name", [name for name, entry in EXPERIMENTS.items() if entry.takes_base])
def test_every_page_can_say_what_the_command_line_changed(name: str) -> None:
    assert "notes" in signature(EXPERIMENTS[name].run).parameters
    with pytest.raises(ValueError, match=f"--with notes: {name} has no such option"):
        command.read_options(name, EXPERIMENTS[name], ["notes=[]"])


def test_what_the_command_line_changed_is_on_the_page(root: Path, tmp_path: Path) -> None:
    outcome = command.reproduce("split", Request(tmp_path, quick=True, overrides=["split.num_clients=5"]))
    said = "- changed: `split.num_clients=5`.\n"
    assert outcome.markdown.endswith(f"\n\n{said}")
    assert outcome.markdown == (tmp_path / "split.md").read_text()
    assert "<li>changed: <code>split.num_clients=5</code>.</li>" in (tmp_path / "split.html").read_text()
    request = Request(tmp_path, data_root=root, auxiliary="tinyimagenet32", overrides=["mode=linear"])
    _, notes = command.base_of("privacy", EXPERIMENTS["privacy"], request, None)
    assert notes == ["Tiny-ImageNet stands in for STL-10", "changed: `mode=linear`"]


# Words and tables


def numbers_of(best: Mapping[str, float], printed: Mapping[str, float], *, quick: bool = False) -> dict[str, Any]:
    rows = [
        {
            **{"block": "α = 0.01", "column": "C = 0.4", "method": method, "settings": {}, "runs": 2, "finished": 2},
            "published": {"text": f"{printed[method]} ± 0.1", "mean": printed[method]} if method in printed else None,
            "best": {"mean": value, "deviation": 0.5, "values": [value]},
            "last": {"mean": value - 1, "deviation": None, "values": [value - 1]},
        }
        for method, value in best.items()
    ]
    return {
        **{"study": "table1", "quick": quick, "rows": rows, "rounds": 5, "seeds": [0, 1], "unfinished": []},
        **{"blocks": ["α = 0.01"], "columns": ["C = 0.4"], "methods": list(best)},
    }


def test_findings_say_who_leads_and_how_far_figures_are_apart() -> None:
    said = comparison.findings(numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2}))
    assert said == [
        "fedaux is best in 1 of 1 columns, by up to 30.0 points (α = 0.01, C = 0.4, over fedavg).",
        "The paper's best method is best here too, or within 1 point of it, in 1 of 1 columns.",
        "0 of 2 figures lie within 1 point of the printed ones, 1 below and 1 above.",
        "Furthest below: fedaux, α = 0.01, C = 0.4, 60.0 against 71.2 ± 0.1, 11.2 points.",
        "Furthest above: fedavg, α = 0.01, C = 0.4, 30.0 against 23.6 ± 0.1, 6.4 points.",
    ]
    lost = comparison.findings(numbers_of({"fedavg": 72.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2}))
    assert lost[0] == "fedaux is best in 0 of 1 columns."
    assert lost[1].endswith("in 0 of 1 columns; not in α = 0.01, C = 0.4: fedaux is 12.0 points behind fedavg.")
    quick = comparison.findings(numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedaux": 71.2}, quick=True))
    assert not any("printed" in line for line in quick)
    close = comparison.findings(numbers_of({"fedavg": 24.0, "fedaux": 71.0}, {"fedavg": 23.6, "fedaux": 71.2}))
    assert close[-1].startswith("2 of 2 figures lie within 1 point")


def test_the_command_says_by_its_status_that_runs_are_missing(tmp_path: Path) -> None:
    words = ["reproduce", "table1", "--quick", "--out", str(tmp_path), "--only", "alpha=0.01", "--time-limit", "1e-9"]
    done = subprocess.run([sys.executable, "-m", "fedaux", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "Nothing is measured yet." in done.stdout
    assert "alpha=0.01,C=0.4,method=fedaux,seed=0: not started" in done.stdout
    assert check_latex((tmp_path / "table1.tex").read_text()) == [4]


def test_unfinished_runs_are_told_and_left_out() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {})
    numbers["rows"][1] |= {"best": None, "last": None, "finished": 0}
    assert comparison.findings(numbers)[0] == "2 of 4 runs are finished; the others are left out."
    (table,) = tables.block_tables(numbers)
    assert [line.name for line in table.lines] == ["fedavg", "fedavg"]
    numbers["rows"] = []
    assert comparison.findings(numbers) == ["Nothing is measured yet."]


def test_tables_are_the_same_in_markdown_latex_and_html() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    (table,) = tables.block_tables(numbers)
    kinds = ["published", "best round", "last round", "best less published"]
    assert [(line.name, line.kind) for line in table.lines] == [(m, k) for m in ("fedavg", "fedaux") for k in kinds]
    text = tables.markdown(table)
    assert "| fedaux | published | **71.2 ± 0.1** |" in text
    assert "| fedaux | best round | **60.0 ± 0.5** |" in text
    assert "| fedavg | last round | 29.0 |" in text
    assert "| fedaux | best less published | -11.2 |" in text
    tex = latex.render(text, label="tab:x")
    assert r"fedaux & published & \textbf{71.2 $\pm$ 0.1}" in tex
    assert check_latex(tex) == [3]
    html = page.render("# title <b>\n\nsome `code`\n\n" + text, {})
    assert "<h1>title &lt;b&gt;</h1>" in html
    assert "<code>code</code>" in html
    assert "<b>60.0 ± 0.5</b>" in html
    assert not re.search(r"https?://(?!www.w3.org)", html), "the page loads nothing"


def test_every_kind_of_figure_can_be_drawn() -> None:
    numbers = numbers_of({"fedavg": 30.0, "fedaux": 60.0}, {"fedavg": 23.6, "fedaux": 71.2})
    central = {**numbers["rows"][0], "method": CENTRAL, "column": "", "published": None}
    for row in numbers["rows"]:
        row["settings"] = {"local.learning_rate": 1e-3} | (
            {"distillation.learning_rate": 1e-4} if row["method"] == "fedaux" else {}
        )
        row["curve"] = [[1, 20.0, 10.0, 30.0], [2, 30.0, 20.0, 40.0]]
    for name, draw in drawing.FIGURES.items():
        rows = numbers["rows"] + ([central] if name == "lines" else [])
        figure = draw({**numbers, "rows": rows})
        assert len(figure.axes) == (2 if name == "heat" else 1)
        if name == "dots":
            assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["fedavg", "fedaux"]
            shown = sorted(float(line.get_xdata()[0]) for line in figure.axes[0].lines)  # type: ignore[index,arg-type]
            assert {23.6, 71.2, 30.0, 60.0} <= set(shown)


def test_best_combinations_stand_beside_the_printed_ones() -> None:
    numbers = numbers_of({"fedaux": 60.0}, {})
    other = {**numbers["rows"][0], "settings": {"local.learning_rate": 1e-2, "distillation.learning_rate": 1e-5}}
    numbers["rows"][0]["settings"] = {"local.learning_rate": 1e-3, "distillation.learning_rate": 1e-4}
    other["best"] = {"mean": 65.0, "deviation": None, "values": [65.0]}
    numbers["rows"].append(other)
    (row,) = presenting.combinations(numbers["rows"])
    assert row["best"]["mean"] == 65.0
    assert row["published"]["mean"] == pytest.approx(75.01)
    (table,) = presenting.combination_tables(numbers)
    assert [[cell.text for cell in line.cells] for line in table.lines] == [
        ["0.001", "0.0001", "–", "75.01"],
        ["0.01", "1e-05", "–", "65.0"],
        ["0.01", "1e-05", "–", "59.0"],
    ]


def test_the_estimate_starts_from_the_measured_rounds() -> None:
    settings = {"participation_rate": 0.4, "split.num_clients": 20, "prototypes": [{"model": "resnet8"}]}
    assert costs.round_seconds("fedaux", settings, 100_000) == pytest.approx(1.89, rel=0.03)
    assert costs.round_seconds("fedavg", settings, 100_000) == pytest.approx(0.35, rel=0.03)
    cell = 100 * costs.round_seconds("fedaux", settings, 100_000)
    assert 162 * 35 < (costs.estimate(STUDIES["table1"]) or 0) < 162 * 2.5 * cell
    assert costs.estimate(STUDIES["nlp"]) is None
    times = {name: time for name, _, _, time, _ in command.listing()}
    assert times["linear"] == "about 0.9 h on a CPU"  # 6 values of alpha, 100 rounds, 2 methods of 4 distill
    assert times["nlp"] == "not measured"


def test_the_papers_figures_stand_beside_the_same_experiment_only(root: Path, tmp_path: Path) -> None:
    execute.run(tiny(method=["fedavg"], rounds=1), out=tmp_path / "another run")
    for mode, shown in (("full", True), ("linear", False)):
        prepared = planned(
            "table1", root, overrides=[f"mode={mode}"], only=["method=[fedavg+p,fedaux]", "alpha=0.01", "C=0.4"]
        )
        rows = running.measure(STUDIES["table1"], prepared, tmp_path)
        assert [row["published"] is not None for row in rows] == [shown, shown]
        assert any("not shown" in note for note in prepared.notes) is not shown
    assert planned("linear", root).comparable


def test_curves_of_a_block_have_one_scale_wherever_its_rows_are_broken() -> None:
    columns = [f"α = {value}" for value in (0.01, 0.1, 1, 10)]
    rows = [
        {"block": block, "column": column, "method": "fedaux", "curve": [[1, at, at, at], [2, at + 5, at, at + 9]]}
        for block, first in (("one", 10), ("other", 60))
        for column, at in zip(columns, range(first, first + 40, 10), strict=True)
    ]
    figure = drawing.curves({"blocks": ["one", "other"], "columns": columns, "methods": ["fedaux"], "rows": rows})
    limits = [axes.get_ylim() for axes in figure.axes if axes.get_visible()]
    assert len(set(limits[:4])) == len(set(limits[4:])) == 1
    assert limits[0] != limits[4]
    assert limits[0][0] <= 10
    assert limits[0][1] >= 49


def test_only_narrows_one_axis_at_a_time() -> None:
    choice = narrowed(STUDIES["table2"].grid, ["auxiliary=[Dogs,STL-10]"])
    assert [value.key for value in choice.grid.columns.values] == ["STL-10", "Dogs"]
    assert choice.grid.blocks == STUDIES["table2"].grid.blocks
