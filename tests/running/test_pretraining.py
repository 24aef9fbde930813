"""`fedaux pretrain`: the command, its file and its card."""

from __future__ import annotations

import errno
import json
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from helpers.experiments import tiny
from helpers.paths import ROOT
from helpers.stored_h0 import equal, extractor
from helpers.typing_commands import invoked
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

import fedaux
from fedaux import seeding
from fedaux.config import Auxiliary, ConfigError, Data
from fedaux.core.compute import has_bf16
from fedaux.data import load_auxiliary, load_labelled
from fedaux.data.tensor_files import save_tensors
from fedaux.models import MODELS
from fedaux.pretrain import content_digest
from fedaux.pretrain.store import CHECKPOINT_ADVICE, probe_line, read_card
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.pretraining import PretrainDisplay, pretrain_prototypes
from reproduce.command import reproduce
from reproduce.planning import Request

pytestmark = pytest.mark.usefixtures("without_pages")


@pytest.fixture(scope="module")
def commanded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a recipe, its h0 and the card; what the command said."""
    folder = tmp_path_factory.mktemp("command")
    return folder, command(folder, "--out", str(folder / "h0.safetensors"))


def command(folder: Path, *words: str, **changes: Any) -> str:
    recipe = folder / "recipe.toml"
    recipe.write_text(tomli_w.dumps(tiny(**changes).to_dict()))
    return invoked(folder, "pretrain", str(recipe), *words)


def test_the_command_pretrains_measures_and_writes_a_card(commanded: tuple[Path, str]) -> None:
    folder, output = commanded
    card = json.loads((folder / "h0.json").read_text())
    assert card["model"] == "cnn"
    assert card["options"] == {"width": 4}
    assert card["image_shape"] == [1, 8, 8]
    assert card["data"] == {
        "digest": content_digest(load_auxiliary(Auxiliary(size=200))),
        "count": 200,
    }
    assert card["pretraining"]["batch_size"] == 64
    assert (card["epochs"], card["seed"], card["precision"]) == (1, 0, "float32")
    assert card["versions"]["torch"] == torch.__version__
    assert 0.5 < card["probe"]["linear"] < 1  # chance is 0.1
    assert f"{100 * card['probe']['linear']:.1f}" in output
    assert f"{card['loss']:.3f}" in output
    assert read_card(folder / "h0.safetensors") == card
    (folder / "h0.json").rename(folder / "elsewhere.json")  # the same card is inside
    assert read_card(folder / "h0.safetensors") == card
    (folder / "elsewhere.json").rename(folder / "h0.json")


def test_a_run_takes_the_commands_h0_as_it_takes_its_own(
    commanded: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = commanded
    given = fedaux.run(
        tiny(rounds=1, pretraining={"checkpoint": str(folder / "h0.safetensors")}),
        out=tmp_path / "given",
    )
    own = fedaux.run(tiny(rounds=1), out=tmp_path / "own")
    assert not (given.directory / "pretrained").exists()
    (path,) = (own.directory / "pretrained").iterdir()
    assert equal(load_file(folder / "h0.safetensors"), load_file(path))
    accuracies = [result.summary["rows"][0]["accuracy_mean"] for result in (given, own)]
    assert accuracies[0] == accuracies[1]


def test_the_command_is_answered_from_the_store(commanded: tuple[Path, str]) -> None:
    folder, _ = commanded
    card = json.loads((folder / "h0.json").read_text())
    for words in (["--no-probe"], []):
        output = command(folder, *words)
        assert "(stored)" in output
        assert "epoch 1/1" not in output
        assert f"{100 * card['probe']['linear']:.1f}" in output, "what was measured before is shown"
        assert "probing" not in output


def test_the_probe_is_on_the_card_of_the_store_and_a_run_shows_it(
    commanded: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = commanded
    card = json.loads((folder / "h0.json").read_text())
    (stored,) = (folder / "cache" / "pretrained").glob("*.safetensors")
    assert json.loads(stored.with_suffix(".json").read_text()) == card
    with safe_open(stored, framework="pt") as file:
        assert json.loads(file.metadata()["card"]) == card
    assert equal(load_file(stored), load_file(folder / "h0.safetensors"))
    data = load_labelled(Data(size=480))
    counts = {"source": "digits", "examples": 480, "test_examples": 359, "classes": 10}
    assert counts.items() <= card["probe"]["data"].items()
    assert card["probe"]["data"]["digest"] == content_digest(data.images)
    shown = (
        f"h0 of cnn, seed 0: linear probe {100 * card['probe']['linear']:.1f} % "
        f"(359 test examples, digits)"
    )
    words = ["run", str(folder / "recipe.toml"), "--set", "rounds=1"]
    for name, more in {
        "own": [],
        "given": ["--set", f"pretraining.checkpoint={folder / 'h0.safetensors'}"],
    }.items():
        assert shown in invoked(folder, *words, *more, "--out", str(tmp_path / name))
    other = command(folder, data={"test_fraction": 0.1})
    assert "probing" in other, "other data is measured anew"
    assert (
        json.loads(stored.with_suffix(".json").read_text())["probe"]["data"]["test_examples"] == 180
    )


def test_cards_of_others_say_nothing_or_what_they_know() -> None:
    old = {
        "prototype": "a",
        "seed": 1,
        "probe": {"linear": 0.5, "neighbours": 0.25, "data": "0a1b"},
    }
    assert probe_line(old) == "h0 of a, seed 1: linear probe 50.0 %"
    for odd in (
        {},
        {"probe": None},
        {"probe": "good"},
        {"probe": {"linear": "high"}},
    ):
        assert probe_line(dict(odd)) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prototypes": [{"name": "mlp", "model": "mlp"}]},
            f"is for the model cnn, the prototype mlp is mlp; {CHECKPOINT_ADVICE}, or "
            "prototypes.model be cnn",
        ),
        (
            {"prototypes": [{"name": "cnn", "model": "cnn", "options": {"width": 8}}]},
            f"is for cnn with width = 4, the prototype cnn has width = 8; {CHECKPOINT_ADVICE}, or "
            "prototypes.options be",
        ),
    ],
)
def test_a_card_of_another_model_is_refused_before_anything_is_written(
    commanded: tuple[Path, str], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    checkpoint = str(commanded[0] / "h0.safetensors")
    with pytest.raises(ConfigError, match=message):
        fedaux.run(tiny(pretraining={"checkpoint": checkpoint}, **changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_card_of_other_images_is_refused(commanded: tuple[Path, str], tmp_path: Path) -> None:
    folder = commanded[0]
    card = json.loads((folder / "h0.json").read_text()) | {"image_shape": [1, 9, 9]}
    (tmp_path / "h0.safetensors").write_bytes((folder / "h0.safetensors").read_bytes())
    (tmp_path / "h0.json").write_text(json.dumps(card))
    with pytest.raises(
        ValueError,
        match=r"is for images of \[1, 9, 9\], not \[1, 8, 8\]; should be .*, or image_s",
    ):
        extractor(tmp_path, checkpoint=str(tmp_path / "h0.safetensors"))
    (tmp_path / "h0.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"h0.json: the card should be a JSON object, is \[1\]"):
        extractor(tmp_path, checkpoint=str(tmp_path / "h0.safetensors"))


def test_a_card_of_another_normalisation_is_refused(tmp_path: Path) -> None:
    trained = {"channel_mean": [0.485]}
    command(tmp_path, "--out", str(tmp_path / "h0.safetensors"), "--no-probe", data=trained)
    checkpoint = {"checkpoint": str(tmp_path / "h0.safetensors")}
    assert fedaux.run(
        tiny(rounds=1, pretraining=checkpoint, data=trained), out=tmp_path / "run"
    ).summary["complete"]
    for data, found in (({}, r"\[\]"), ({"channel_mean": [0.5]}, r"\[0\.5\]")):
        with pytest.raises(
            ConfigError,
            match=rf"data.channel_mean = {found}: pretraining.checkpoint = .*h0.safetensors was "
            r"trained with \[0.485\]; should be the same",
        ):
            fedaux.run(tiny(pretraining=checkpoint, data=data), out=tmp_path / "refused")
    deviation = trained | {"channel_deviation": [0.2]}
    with pytest.raises(ConfigError, match=r"data.channel_deviation = \[0.2\]: .* with \[1\]"):
        fedaux.run(tiny(pretraining=checkpoint, data=deviation), out=tmp_path / "refused")


def test_several_prototypes_share_a_file(tmp_path: Path) -> None:
    two = [
        {"name": "small", "model": "cnn", "options": {"width": 4}},
        {"name": "flat", "model": "mlp"},
    ]
    output = command(
        tmp_path, "--out", str(tmp_path / "two.safetensors"), "--no-probe", prototypes=two
    )
    assert "small" in output
    assert "flat" in output
    checkpoint = {"checkpoint": str(tmp_path / "two.safetensors")}
    result = fedaux.run(
        tiny(prototypes=two, rounds=1, pretraining=checkpoint), out=tmp_path / "run"
    )
    assert result.summary["complete"]
    lone = [{"name": "other", "model": "cnn", "options": {"width": 4}}]
    with pytest.raises(
        ConfigError,
        match=f"small, flat, not of other; {CHECKPOINT_ADVICE}, or prototypes.name be one",
    ):
        fedaux.run(tiny(prototypes=lone, pretraining=checkpoint), out=tmp_path / "refused")


@pytest.mark.slow
def test_the_networks_of_the_paper_are_pretrained_and_probed(tmp_path: Path) -> None:
    networks = [{"name": name, "model": name} for name in ("mobilenetv2", "shufflenet")]
    settings: dict[str, Any] = {
        "auxiliary": {"size": 32},
        "pretraining": {"epochs": 1, "batch_size": 16},
    }
    data = {"size": 100, "test_size": 50}
    path = tmp_path / "h0.safetensors"
    output = command(tmp_path, "--out", str(path), prototypes=networks, data=data, **settings)
    cards = json.loads(path.with_suffix(".json").read_text())["prototypes"]
    held = load_file(path)
    for name in ("mobilenetv2", "shufflenet"):
        with seeding.initialisation(0, part=name):
            start = MODELS[name]((1, 8, 8), 10).features.state_dict()
        moved = [
            key for key, tensor in start.items() if not torch.equal(tensor, held[f"{name}/{key}"])
        ]
        assert set(moved) == set(start), "every weight and statistic has been trained"
        assert (cards[name]["epochs"], cards[name]["model"]) == (1, name)
        assert 0.2 < cards[name]["probe"]["linear"] <= 1  # chance is 0.1
        assert f"{100 * cards[name]['probe']['linear']:.1f}" in output
    mixed = {
        prototype.model for prototype in load_experiment(find_recipe("cifar10-mixed")).prototypes
    }
    assert mixed == {"resnet8", "mobilenetv2", "shufflenet"}
    assert load_experiment(find_recipe("cifar10-one-shot")).prototypes[0].model == "mobilenetv2"


@pytest.mark.slow
def test_the_benchmark_times_and_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    namespace = runpy.run_path(str(folder / "pretrain.py"))
    words = (
        "--device cpu --way fp32 --way bf16 --images 80 --batch-size 40 --timed-epochs 1 "
        "--variant cosine --epochs 2"
    )
    namespace["main"](
        [
            *words.split(),
            "--every",
            "2",
            "--set",
            "auxiliary.size=220",
            "--json",
            str(tmp_path / "b.json"),
        ]
    )
    result = json.loads((tmp_path / "b.json").read_text())
    assert set(result["ways"]) == ({"fp32", "bf16"} if has_bf16(torch.device("cpu")) else {"fp32"})
    for measured in result["ways"].values():
        assert measured["images_per_second"] == pytest.approx(80 / measured["epoch"])
        assert measured["first_epoch"] > 0
    assert [point["epoch"] for point in result["probes"]["cosine"]] == [0, 2]
    assert all(point["linear"] > 0.5 for point in result["probes"]["cosine"])
    assert "images/s" in capsys.readouterr().out


def test_the_command_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    assert "nothing to pretrain" in command(tmp_path, pretraining={"kind": "none"})
    assert "should end in .safetensors" in command(tmp_path, "--out", "h0.pt")


SYSTEM = Path("/sys")  # where nobody, not even root, can make a file


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (
            "recipe.toml/h0.safetensors",
            r"/recipe\.toml is a file; should be a folder, to hold h0\.safetensors",
        ),
        ("recipe.toml/deeper/h0.safetensors", r"/recipe\.toml is a file; should be a folder"),
        ("folder.safetensors", "is a folder; should be a file in it"),
        (f"{'x' * 300}.safetensors", "is not writable .* too long"),
        pytest.param(
            f"{SYSTEM}/h0.safetensors",
            r"/sys is not writable \((Permission denied|Read-only file system)\); should be a "
            r"file in",
            marks=pytest.mark.skipif(
                not SYSTEM.is_dir(), reason="needs a folder in which nobody can make files"
            ),
        ),
    ],
)
def test_a_place_for_h0_is_tried_before_anything_is_trained(
    tmp_path: Path, place: str, message: str
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    output = command(tmp_path, "--out", str(tmp_path / place))
    assert re.match(rf"--out {re.escape(str(tmp_path / place))}: .*{message}", output)
    assert not (tmp_path / "cache").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.safetensors", "recipe.toml"]


def test_a_place_for_h0_is_made_only_in_the_end(tmp_path: Path) -> None:
    out = tmp_path / "new" / "deeper" / "h0.safetensors"
    assert "nothing to pretrain" in command(
        tmp_path, "--out", str(out), pretraining={"kind": "none"}
    )
    assert not (tmp_path / "new").exists()
    command(tmp_path, "--out", str(out))
    assert out.exists()


@pytest.mark.parametrize("store", [True, False])
def test_h0_that_cannot_be_written_in_the_end_is_told_with_its_place_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    begin = PretrainDisplay.begin

    def taken(watch: PretrainDisplay, name: str, *, epochs: int) -> None:
        (tmp_path / "place").touch()  # by somebody else, meanwhile
        begin(watch, name, epochs=epochs)

    monkeypatch.setattr(PretrainDisplay, "begin", taken)
    if not store:
        monkeypatch.setattr("fedaux.running.pretraining.shared_store", lambda: None)
    output = command(tmp_path, "--out", str(tmp_path / "place" / "h0.safetensors"), "--no-probe")
    assert f"could not be written ({os.strerror(errno.EEXIST)}); " in output
    assert output.endswith(f"'--out {tmp_path / 'place' / 'h0.safetensors'}'")
    files = list((tmp_path / "cache").rglob("cnn-*.safetensors"))
    assert len(files) == store
    left = (
        f"h0 is in the store ({files[0]}); use"
        if store
        else "without a store (FEDAUX_CACHE) h0 is not saved"
    )
    assert left in output


@pytest.mark.skipif(not SYSTEM.is_dir(), reason="needs a folder in which nobody can make files")
def test_tensors_that_cannot_be_written_are_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match=r"'/sys/h0\.safetensors'") as told:
        save_tensors(SYSTEM / "h0.safetensors", {"a": torch.zeros(1)})
    assert told.value.errno in {errno.EACCES, errno.EROFS, errno.EPERM}


@pytest.mark.parametrize(
    "words",
    [
        [
            "run",
            "demo",
            "--set",
            "method=fedaux",
            "--set",
            "seeds=[0]",
            "--set",
            "engine.device=cpu",
        ],
        ["pretrain", "demo"],
        ["reproduce", "ensemble", "--quick"],
        ["reproduce", "similar-images", "--quick"],
    ],
)
def test_a_gpu_too_small_for_pretraining_is_explained(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def overflow(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of the packages that the command line is made of
        from fedaux import cli
    monkeypatch.setattr("fedaux.pretrain.training.Training._step", overflow)
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["fedaux", *words, "--out", str(tmp_path / "h0.safetensors")])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    said = " ".join(capsys.readouterr().err.split())
    assert stopped.value.code == 2, said
    assert "pretraining of cnn: out of GPU memory. Reduce pretraining.batch_size (now 200)" in said
    assert "clients_at_once" not in said


def test_a_gpu_too_small_for_an_experiment_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("fedaux.fast.FastBackend.predictor", overflow)
    monkeypatch.setattr(
        "reproduce.similar_images.ExperimentRunner.extractor", lambda *_: lambda *_: {}
    )
    with pytest.raises(
        ValueError, match=r"similar-images: out of GPU memory.* evaluation.batch_size \(now 4096\)"
    ):
        reproduce("similar-images", Request(tmp_path, quick=True))
    with pytest.raises(ValueError, match="probe of cnn: out of GPU memory; --no-probe"):
        pretrain_prototypes(tiny(), seed=0, display=PretrainDisplay(Console()))
