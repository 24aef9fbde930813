"""Studies: their grids are the paper's, their data is found or named, and parts of them can be
asked for."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.experiments import tiny
from helpers.study_data import planned, settings, write_images

from fedaux.config import Local
from fedaux.running import run as execute
from reproduce import command, datasets, planning, privacy_grid, published
from reproduce.document import Context
from reproduce.experiments import EXPERIMENTS
from reproduce.planning import CENTRAL, Request, plan
from reproduce.studies import STUDIES
from reproduce.study import narrowed

pytest.importorskip("pyarrow")
SIX = [0.01, 0.04, 0.16, 0.64, 2.56, 10.24]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data"))


def test_every_table_and_figure_has_its_name() -> None:
    listed = command.listing().rows
    names = {row[0] for row in listed}
    assert names == {
        *(
            "table1",
            "table2",
            "table3",
            "cifar100",
            "nlp",
            "hpo",
            "architectures",
            "curves",
            "linear",
            "privacy",
        ),
        *("split", "toy-iris", "toy-gaussians", "similar-images", "qualitative", "ensemble"),
        "robustness",
    }
    assert all(all(row) for row in listed)


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
            assert (experiment.pretraining.learning_rate, experiment.pretraining.batch_size) == (
                1e-3,
                512,
            )
            assert experiment.bayesian.samples == 10
            assert experiment.rounds == (1 if name == "table3" else 100)


def test_table1_is_the_paper_s_grid(root: Path) -> None:
    cells = settings(planned("table1", root))
    assert len(cells) == 9 * 2 * 3 * 3
    found = {(e.method[0], e.split.alpha, e.participation_rate, e.seeds[0]) for e in cells}
    methods = [
        "fedavg",
        "fedprox",
        "feddf",
        "fedbe",
        "fedavg+p",
        "fedprox+p",
        "feddf+p",
        "fedbe+p",
        "fedaux",
    ]
    assert found == {
        (m, a, c, s)
        for m in methods
        for a in (0.01, 100.0)
        for c in (0.2, 0.4, 0.8)
        for s in (0, 1, 2)
    }
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
    subsets = [
        ("parquet", name) for name in ("invertebrates", "birds", "devices", "dogs", "structures")
    ]
    assert set(kinds) == {
        ("stl10-binary", None),
        ("cifar100-binary", None),
        ("svhn", None),
        *subsets,
    }
    assert set(kinds.values()) == {18}
    assert prepared.notes == ("Tiny-ImageNet stands in for ImageNet",)
    neighbours = [(e.auxiliary.source, e.auxiliary.path) for e in cells]
    changes = sum(one != other for one, other in pairwise(neighbours))
    assert changes == 3, "runs on the same data follow one another"


OURS = "auxiliary=[Tiny-ImageNet,Animals,Dogs,Noise]"


def test_table2_has_columns_of_ours_where_they_are_named(root: Path, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "h0.safetensors").touch()
    prepared = planned(
        "table2",
        root,
        only=["alpha=0.01", OURS],
        overrides=["rounds=10"],
    )
    cells = settings(prepared)
    assert len(cells) == 3 * 4 * 3
    assert [value.label for value in prepared.grid.columns.values] == [
        "Dogs",
        "Animals",
        "Tiny-ImageNet",
        "Noise",
    ]
    assert {e.rounds for e in cells} == {10}
    found = {
        (e.auxiliary.source, e.auxiliary.wordnet, e.auxiliary.size, e.auxiliary.path is None)
        for e in cells
    }
    read = {("parquet", name, None, False) for name in (None, "animals", "dogs")}
    assert found == {*read, ("noise", None, 100_000, True)}
    for place in prepared.places.values():
        assert (published.printed("table2", place.block, place.column, place.method) is None) == (
            place.column != "Dogs"
        )
    small = settings(
        planned("table2", root, only=["auxiliary=Noise"], overrides=["auxiliary.size=300"])
    )
    assert {e.auxiliary.size for e in small} == {300}
    one_h0 = settings(
        planned("table2", root, only=[OURS], overrides=[f"pretraining.checkpoint={checkpoint}"])
    )
    assert {e.pretraining.checkpoint for e in one_h0} == {str(checkpoint)}
    with pytest.raises(
        ValueError, match="STL-10 and Tiny-ImageNet read the same data; choose one of them"
    ):
        planned(
            "table2", root, auxiliary="tinyimagenet32", only=["auxiliary=[STL-10,Tiny-ImageNet]"]
        )
    floor = planned("table1", root, auxiliary="noise")
    assert {(e.auxiliary.source, e.auxiliary.size) for e in settings(floor)} == {("noise", 100_000)}
    assert "noise stands in for STL-10" in floor.notes


def test_what_is_there_is_offered_where_columns_are_missing(tmp_path: Path, root: Path) -> None:
    for name in ("cifar10", "tinyimagenet32"):
        (tmp_path / name).symlink_to(root / name)
    with pytest.raises(ValueError, match="2 of 5 data sets missing") as error:
        plan(STUDIES["table2"], Request(tmp_path, data_root=tmp_path, auxiliary="tinyimagenet32"))
    left = "'auxiliary=[STL-10,Invertebrates,Birds,Devices,Dogs,Structures]'"
    assert str(error.value).endswith(f"The available data suffice for --only {left}")


def test_table3_cifar100_and_linear_are_the_paper_s_grids(root: Path) -> None:
    one_shot = settings(planned("table3", root))
    assert len(one_shot) == 7 * 2 * 4 * 3
    assert {(e.split.num_clients, e.participation_rate) for e in one_shot} == {(100, 1.0)}
    assert {(e.prototypes[0].model, len(e.prototypes)) for e in one_shot} == {
        ("mobilenetv2", 1),
        ("shufflenet", 1),
    }
    assert sorted({e.split.alpha for e in one_shot}) == [0.01, 0.04, 0.16, 10.24]
    many = settings(planned("cifar100", root))
    assert len(many) == 4 * 6
    assert {e.data.source for e in many} == {"cifar100-binary"}
    assert sorted({e.split.alpha for e in many}) == SIX
    linear = settings(planned("linear", root))
    assert {(e.mode, e.split.num_clients, e.participation_rate) for e in linear} == {
        ("linear", 80, 0.4)
    }
    assert sorted({e.split.alpha for e in linear}) == SIX


def test_architectures_has_the_paper_s_populations_and_shares_its_runs_with_curves(
    root: Path,
) -> None:
    prepared = planned("architectures", root)
    federated = [cell for cell in prepared.cells if prepared.places[cell.name].method != CENTRAL]
    found = {
        (tuple(p.model for p in cell.experiment.prototypes), cell.experiment.split.num_clients)
        for cell in federated
    }
    three = ("resnet8", "mobilenetv2", "shufflenet")
    assert found == {(three[:1], 80), (three[1:2], 100), (three[2:], 100), (three, 60)}
    assert len(federated) == 3 * 4 * 6
    central = [cell.experiment for cell in prepared.cells if cell not in federated]
    assert [(e.split.num_clients, e.participation_rate, len(e.prototypes)) for e in central] == [
        (1, 1.0, 1)
    ] * 3
    curves = {cell.name: cell.experiment.sha256() for cell in planned("curves", root).cells}
    assert curves == {cell.name: cell.experiment.sha256() for cell in federated}
    assert command.default_folder("curves", quick=False) == command.default_folder(
        "architectures", quick=False
    )


def test_hpo_tunes_what_a_method_looks_at(root: Path) -> None:
    prepared = planned("hpo", root)
    counts = Counter(cell.experiment.method[0] for cell in prepared.cells)
    assert counts == {
        **dict.fromkeys(("fedavg", "fedavg+p"), 2 * 4),
        **dict.fromkeys(("fedprox", "fedprox+p", "feddf", "feddf+p", "fedbe", "fedaux"), 2 * 16),
    }
    rates = {1e-2, 1e-3, 1e-4, 1e-5}
    for experiment in settings(prepared):
        assert (experiment.rounds, experiment.split.num_clients, experiment.participation_rate) == (
            50,
            20,
            0.4,
        )
        assert experiment.local.learning_rate in rates
    assert {
        e.distillation.learning_rate for e in settings(prepared) if e.method == ("fedaux",)
    } == rates
    assert {e.local.proximal for e in settings(prepared) if e.method == ("fedprox",)} == rates


def test_privacy_and_similar_images_have_the_paper_s_settings(root: Path) -> None:
    request = Request(root / "out", data_root=root)
    base, _ = command.base_of("privacy", EXPERIMENTS["privacy"], request, None)
    assert (base.rounds, base.split.num_clients, base.participation_rate, base.split.alpha) == (
        10,
        40,
        0.4,
        0.01,
    )
    grids = privacy_grid.PAPER_GRIDS
    assert {0.04, 0.1} <= set(grids["paper"]["epsilon"])
    assert 1e-6 in grids["paper"]["delta"]
    assert set(grids["paper"]["regularisation"]) == {0.01, 0.1}
    dogs, notes = command.base_of("similar-images", EXPERIMENTS["similar-images"], request, None)
    assert (dogs.auxiliary.wordnet, dogs.split.alpha) == ("dogs", 0.01)
    assert notes == ["Tiny-ImageNet stands in for ImageNet"]
    for name in ("split", "qualitative", "ensemble"):
        base, _ = command.base_of(name, EXPERIMENTS[name], request, None)
        assert base.data.source == "cifar10-binary"


def test_nlp_says_where_texts_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Path:
        raise ValueError(name)

    monkeypatch.setattr(planning, "find_recipe", none)
    with pytest.raises(
        ValueError, match="not available, because this version of fedaux cannot read texts"
    ):
        planned("nlp", root)
    assert "not in this version" in next(
        str(row[1]) for row in command.listing().rows if row[0] == "nlp"
    )


def test_nlp_is_listed_and_says_what_it_needs(tmp_path: Path) -> None:
    import pyarrow.parquet

    with pytest.raises(ValueError, match="for --quick too: no texts are embedded") as error:
        plan(STUDIES["nlp"], Request(tmp_path, quick=True))
    assert "or give --quick" not in str(error.value)
    for name, columns in (
        ("ag_news", {"text": ["some words"] * 200, "label": [0, 1] * 100}),
        ("book_sentences", {"text": ["a sentence"] * 30}),
    ):
        (tmp_path / name).mkdir()
        for part in ("train", "test"):
            pyarrow.parquet.write_table(
                pyarrow.table(columns), tmp_path / name / f"{part}-0.parquet"
            )
    with pytest.raises(ValueError, match="1 of 3 data sets missing") as error:
        plan(STUDIES["nlp"], Request(tmp_path, data_root=tmp_path))
    assert str(error.value).endswith("The available data suffice for --only 'data=[ag_news]'")
    request = Request(tmp_path, data_root=tmp_path, only=["data=ag_news"])
    assert command.size_line("nlp", request) == "nlp: 18 runs, 360 rounds"
    assert "--data-root" in next(str(row[3]) for row in command.listing().rows if row[0] == "nlp")


def test_another_set_takes_the_place_of_stl10(root: Path) -> None:
    prepared = planned("table1", root, auxiliary="tinyimagenet32", seeds=1)
    assert {e.auxiliary.source for e in settings(prepared)} == {"parquet"}
    assert prepared.notes[0] == "Tiny-ImageNet stands in for STL-10"
    with pytest.raises(ValueError, match="--aux imagenet: should be one of"):
        planned("table1", root, auxiliary="imagenet")
    with pytest.raises(ValueError, match="--aux noise: it replaces STL-10, which nothing here"):
        planned("table2", root, auxiliary="noise", only=["auxiliary=Tiny-ImageNet"])


def test_aux_replaces_the_public_data_of_an_experiment(tmp_path: Path, root: Path) -> None:
    entry = EXPERIMENTS["robustness"]
    request = Request(tmp_path, data_root=root, auxiliary="noise")
    base, notes = command.base_of("robustness", entry, request, None)
    assert base.auxiliary.source == "noise"
    assert notes == ["noise stands in for Tiny-ImageNet"]
    unread = replace(request, data_root=None, quick=True)
    for other, recipe in ((unread, None), (replace(unread, quick=False), "demo")):
        with pytest.raises(ValueError, match="--aux noise: it replaces public data below"):
            command.base_of("robustness", entry, other, recipe)
    with pytest.raises(ValueError, match="--aux noise: it replaces public data below"):
        command.base_of("split", EXPERIMENTS["split"], request, None)


def test_set_cannot_change_what_an_experiment_varies(tmp_path: Path) -> None:
    for name, entry in EXPERIMENTS.items():
        for key, option in entry.varies.items():
            assert option in signature(entry.run).parameters
            request = Request(tmp_path, quick=True, overrides=[f"{key}=1"])
            with pytest.raises(ValueError, match=f"--set {key}=1: .* --with {option}="):
                command.base_of(name, entry, request, None)
        for key in entry.unused:
            request = Request(tmp_path, quick=True, overrides=[f"{key}=1"])
            with pytest.raises(ValueError, match=f"--set {key}=1: {name} does not use {key}"):
                command.base_of(name, entry, request, None)
    kept = Request(tmp_path, quick=True, overrides=["output.models=true"])
    with pytest.raises(ValueError, match=r"robustness does not use output\.models"):
        command.base_of("robustness", EXPERIMENTS["robustness"], kept, None)
    whole = Request(tmp_path, quick=True, overrides=["split={alpha=7.0,num_clients=4}"])
    with pytest.raises(ValueError, match=r"robustness varies split\.alpha"):
        command.base_of("robustness", EXPERIMENTS["robustness"], whole, None)
    with pytest.raises(ValueError, match=r"the study varies split\.alpha"):
        plan(STUDIES["table1"], whole)


@pytest.mark.parametrize("name", ["split", "similar-images", "qualitative"])
def test_several_seeds_are_refused_where_one_is_used(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--seeds 2: {name} uses one seed; .*seeds=\\[1\\]"):
        command.reproduce(name, Request(tmp_path, quick=True, seeds=2))
    chosen = Request(tmp_path, quick=True, overrides=["seeds=[3,4]"])
    with pytest.raises(ValueError, match=r"--set seeds=\[3,4\]: .*seeds=\[4\]"):
        command.reproduce(name, chosen)


@pytest.mark.parametrize("option", [{"jobs": 2}, {"devices": ["cpu"]}, {"time_limit": 1.0}])
def test_options_of_a_grid_are_refused_without_one(
    option: dict[str, object], tmp_path: Path
) -> None:
    (name,) = option
    with pytest.raises(
        ValueError, match=f"--{name.replace('_', '-')}: split is not a grid of runs"
    ):
        command.reproduce("split", Request(tmp_path, quick=True, sweeping=option))


def test_data_come_from_one_place(tmp_path: Path, root: Path) -> None:
    split, both = EXPERIMENTS["split"], Request(tmp_path, data_root=root, quick=True)
    for given, recipe in (
        (replace(both, quick=False), "demo"),
        (replace(both, data_root=None), "demo"),
    ):
        with pytest.raises(ValueError, match="--recipe demo: states the data itself"):
            command.base_of("split", split, given, recipe)
    with pytest.raises(ValueError, match="--quick has embedded data"):
        command.base_of("split", split, both, None)
    with pytest.raises(ValueError, match="--quick has embedded data"):
        plan(STUDIES["table1"], both)
    for change in ("data.path=x", "auxiliary.path=x"):
        with pytest.raises(ValueError, match=f"--set {change}: --data-root, or --quick, chooses"):
            plan(STUDIES["table1"], Request(tmp_path, quick=True, overrides=[change]))
    sized = Request(tmp_path, quick=True, overrides=["auxiliary.size=500"])
    with pytest.raises(ValueError, match=r"--set auxiliary\.size=500: .* chooses the data"):
        plan(STUDIES["cifar100"], sized)


def test_alpha_is_not_varied_where_clients_have_their_own_data(tmp_path: Path) -> None:
    (recipe := tmp_path / "silos.toml").write_text(
        'extends = "demo"\n[data]\nsource = "csv"\nclients = ["a.csv", "b.csv"]\ntest = "c.csv"\n'
        "[split]\nnum_clients = 2\n"
    )
    with pytest.raises(ValueError, match=r"--with alphas: data\.clients states what each client"):
        command.reproduce("robustness", Request(tmp_path / "out"), recipe=str(recipe))
    assert not (tmp_path / "out").exists()


def test_only_names_an_axis_once(root: Path) -> None:
    with pytest.raises(ValueError, match=r"method is given twice; several are method=\[A,B\]"):
        planned("table1", root, only=["method=fedaux", "method=feddf"])


def test_the_privacy_grid_varies_mechanisms_that_a_method_uses(tmp_path: Path) -> None:
    context = Context(tmp_path, tiny(rounds=1))
    with pytest.raises(ValueError, match="method=fedaux2: its mechanism is always classes"):
        privacy_grid.run(context, method="fedaux2")
    for name in ("fedavg", "fedaux3"):
        with pytest.raises(ValueError, match=f"method={name}: should be a method with scores"):
            privacy_grid.run(context, method=name)


@pytest.mark.parametrize(
    "change", ["auxiliary.path=other", "data.source=tensors", "data={path='x',source='tensors'}"]
)
def test_set_cannot_change_the_data_below_the_root(tmp_path: Path, root: Path, change: str) -> None:
    request = Request(tmp_path, data_root=root, overrides=[change])
    said = re.escape(f"--set {change}: --data-root, or --quick, chooses")
    with pytest.raises(ValueError, match=said):
        command.base_of("robustness", EXPERIMENTS["robustness"], request, None)
    with pytest.raises(ValueError, match=said):
        plan(STUDIES["table1"], replace(request, auxiliary="tinyimagenet32"))


def test_missing_data_is_named_with_its_place(tmp_path: Path, root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"--data-root: missing; CIFAR-10, STL-10 .* or give --quick"
    ):
        plan(STUDIES["table1"], Request(tmp_path))
    with pytest.raises(ValueError, match="there is no such folder"):
        plan(STUDIES["table1"], Request(tmp_path, data_root=tmp_path / "nothing"))
    (tmp_path / "tinyimagenet32").mkdir()
    (tmp_path / "tinyimagenet32/train-0.parquet").touch()
    with pytest.raises(ValueError, match="2 of 2 data sets missing") as error:
        plan(STUDIES["table1"], Request(tmp_path, data_root=tmp_path))
    said = str(error.value)
    assert (
        f"CIFAR-10: none of {tmp_path}/cifar10/train*.parquet, {tmp_path}/cifar10/data_batch_*.bin"
        in said
    )
    assert "--aux tinyimagenet32 uses it instead" in said
    assert not (tmp_path / "cells").exists()


def test_the_hub_s_folders_a_configuration_are_found(tmp_path: Path) -> None:
    (tmp_path / "cifar10/plain_text").mkdir(parents=True)
    (tmp_path / "cifar10/plain_text/train-00000-of-00001.parquet").touch()
    found = datasets.locate(tmp_path, ["cifar10"])["cifar10"]
    assert (found.source, found.path) == ("parquet", (tmp_path / "cifar10/plain_text").resolve())
    unlabeled = tmp_path / "stl10/unlabeled-00000-of-00001.parquet"
    unlabeled.parent.mkdir()
    unlabeled.touch()
    assert datasets.locate(tmp_path, ["stl10"])["stl10"].path == unlabeled.parent.resolve()
    (tmp_path / "stl10/train-00000-of-00001.parquet").touch()
    assert datasets.locate(tmp_path, ["stl10"])["stl10"].path == unlabeled.resolve(), (
        "not the labelled ones"
    )


def test_a_part_can_be_asked_for(root: Path) -> None:
    prepared = planned(
        "table1",
        root,
        only=["alpha=0.01", "C=[0.4,0.8]", "method=[fedaux,fedavg]"],
        also=["fedaux+m"],
        seeds=2,
    )
    whole = {cell.name for cell in planned("table1", root).cells}
    names = [cell.name for cell in prepared.cells]
    assert len(names) == 2 * 3 * 2
    assert {name for name in names if "fedaux+m" not in name} <= whole, (
        "a part's runs count for the whole"
    )
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
    found = {
        (e.method[0], e.split.alpha): e.local.proximal
        for e in settings(prepared)
        if "prox" in e.method[0]
    }
    assert found == {
        **{("fedprox", 0.01): 0.01, ("fedprox", 100.0): 0.001},
        **{("fedprox+p", 0.01): 0.01, ("fedprox+p", 100.0): 0.0001},
    }
    assert {e.local.proximal for e in settings(prepared) if "prox" not in e.method[0]} == {
        Local().proximal
    }
    (note,) = prepared.notes
    assert (
        "fedprox 0.01 at α = 0.01; fedprox+p 0.01 at α = 0.01; fedprox 0.001 at α = 100; "
        "fedprox+p 0.0001" in note
    )
    linear = {
        e.split.alpha: e.local.proximal
        for e in settings(planned("linear", root))
        if e.method == ("fedprox+p",)
    }
    assert linear == dict.fromkeys(SIX[:4], 0.01) | dict.fromkeys(SIX[4:], 0.0001)
    changed = planned("table1", root, overrides=["local.proximal=0.01"])
    assert {cell.experiment.local.proximal for cell in changed.cells} == {0.01}
    assert changed.notes == ()


def test_folders_from_before_mu_was_the_paper_s_can_be_gone_on_with(root: Path) -> None:
    before = {
        cell.name: cell.experiment.sha256()
        for cell in planned("table1", root, overrides=["local.proximal=0.01"]).cells
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
def test_quick_versions_keep_the_methods_and_say_what_is_cut(
    name: str, tmp_path: Path, root: Path
) -> None:
    quick = plan(STUDIES[name], Request(tmp_path, quick=True))
    assert quick.methods == planned(name, root).methods
    assert quick.grid.cut
    assert len(quick.cells) <= 60
    assert all(cell.experiment.certainty.epsilon == 0.5 for cell in quick.cells)
    with pytest.raises(ValueError, match="other public data"):
        plan(STUDIES[name], Request(tmp_path, quick=True, auxiliary="tinyimagenet32"))


def test_the_papers_figures_stand_beside_the_same_experiment_only(
    root: Path, tmp_path: Path
) -> None:
    execute.run(tiny(method=["fedavg"], rounds=1), out=tmp_path / "another run")
    for mode, shown in (("full", True), ("linear", False)):
        prepared = planned(
            "table1",
            root,
            overrides=[f"mode={mode}"],
            only=["method=[fedavg+p,fedaux]", "alpha=0.01", "C=0.4"],
        )
        rows = planning.measure(STUDIES["table1"], prepared, tmp_path)
        assert [row["published"] is not None for row in rows] == [shown, shown]
        assert any("not shown" in note for note in prepared.notes) is not shown
    assert planned("linear", root).comparable


def test_only_narrows_one_axis_at_a_time() -> None:
    grid, methods = narrowed(STUDIES["table2"].grid, ["auxiliary=[Dogs,STL-10]"])
    assert [value.key for value in grid.columns.values] == ["STL-10", "Dogs"]
    assert grid.blocks == STUDIES["table2"].grid.blocks
    assert methods is None


def test_options_are_those_of_the_experiment() -> None:
    assert command.read_options("split", EXPERIMENTS["split"], ["alphas=[0.1]"]) == {
        "alphas": [0.1]
    }
    with pytest.raises(ValueError, match="--with context: split has no such option; it has alphas"):
        command.read_options("split", EXPERIMENTS["split"], ["context=1"])
    with pytest.raises(ValueError, match="should be a value like"):
        command.read_options("split", EXPERIMENTS["split"], ["alphas=1"])


def test_what_the_command_line_changed_is_on_the_page(root: Path, tmp_path: Path) -> None:
    outcome = command.reproduce(
        "split", Request(tmp_path, quick=True, overrides=["split.num_clients=5"])
    )
    assert outcome.markdown.endswith("\n\n- changed: `split.num_clients=5`.\n")
    assert outcome.markdown == (tmp_path / "split.md").read_text()
    assert (
        "<li>changed: <code>split.num_clients=5</code>.</li>"
        in (tmp_path / "split.html").read_text()
    )
    request = Request(
        tmp_path, data_root=root, auxiliary="tinyimagenet32", overrides=["mode=linear"]
    )
    _, notes = command.base_of("privacy", EXPERIMENTS["privacy"], request, None)
    assert notes == ["Tiny-ImageNet stands in for STL-10"]
