"""h0 of a server that has public data and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from helpers.corpus import texts_of
from helpers.experiments import IMAGE_MODELS, tiny
from helpers.stored_h0 import equal
from helpers.typing_commands import invoked
from safetensors.torch import load_file, save_file

import fedaux
from fedaux import seeding
from fedaux.config import Auxiliary, ConfigError, Experiment, inspect
from fedaux.data import load_auxiliary
from fedaux.data.tensor_files import weights_digest
from fedaux.federation.folder import write_folder
from fedaux.models import MODELS, SplitModel
from fedaux.recipes import merged
from fedaux.running.preflight import check_public, problems_of

pytestmark = pytest.mark.usefixtures("without_pages")

UNMEASURED = "no labelled data given: h0 is not measured"
DO_WITHOUT = "labelled data is optional: --set data.source=none"
LEFT_OUT = (
    "data: required except by `fedaux pretrain`; data.source should be digits, tensors, features"
)


def pretrained(
    folder: Path, experiment: Experiment, *words: str, without: tuple[str, ...] = ()
) -> tuple[str, Path]:
    """Write a recipe without some of its tables, pretrain it in a separate store; return what was
    said, and h0."""
    folder.mkdir(exist_ok=True)
    table = {key: value for key, value in experiment.to_dict().items() if key not in without}
    (folder / "recipe.toml").write_text(tomli_w.dumps(table))
    out = folder / "h0.safetensors"
    return invoked(folder, "pretrain", str(folder / "recipe.toml"), "--out", str(out), *words), out


def card_of(h0: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads(h0.with_suffix(".json").read_text())
    return {key: value for key, value in card.items() if key not in {"seconds", "date"}}


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Any]:
    """Public images of the server's own."""
    save_file({"images": load_auxiliary(Auxiliary(size=120))}, tmp_path / "public.safetensors")
    return {"source": "tensors", "path": str(tmp_path / "public.safetensors"), "size": 100}


@pytest.mark.slow
def test_h0_of_images_is_the_same_without_labelled_data(
    tmp_path: Path, pictures: dict[str, Any]
) -> None:
    labelled = tiny(auxiliary=pictures, rounds=1)
    said, with_labels = pretrained(tmp_path / "with", labelled)
    assert "probing" in said
    assert UNMEASURED not in said
    said, without = pretrained(tmp_path / "without", labelled, without=("data", "split"))
    assert said.count(UNMEASURED) == 1
    assert "probing" not in said
    assert "(stored)" not in said
    assert "again" not in said
    assert weights_digest(load_file(without)) == weights_digest(load_file(with_labels))
    stored = [
        [path.name for path in (h0.parent / "cache").rglob("*.safetensors")]
        for h0 in (with_labels, without)
    ]
    assert stored[0] == stored[1], "a run with labelled data finds it in the store"
    card = card_of(without)
    assert card["probe"] is None
    assert card["image_shape"] == [1, 8, 8]
    assert card_of(with_labels)["probe"]["data"]["source"] == "digits"
    assert card == card_of(with_labels) | {"probe": None}
    own = fedaux.run(labelled, out=tmp_path / "own")
    given = merged(labelled.to_dict(), {"pretraining": {"checkpoint": str(without)}})
    taken = fedaux.run(Experiment(**given), out=tmp_path / "taken")
    (trained,) = (own.directory / "pretrained").iterdir()
    assert equal(load_file(trained), load_file(without))
    assert not (taken.directory / "pretrained").exists()
    assert taken.summary["rows"][0]["accuracy_mean"] == own.summary["rows"][0]["accuracy_mean"]


def test_h0_of_texts_is_the_same_without_labelled_data(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text")
    labelled = texts_of(corpus, rounds=1)
    _, with_labels = pretrained(tmp_path / "with", labelled)
    (corpus / "news.csv").rename(tmp_path / "elsewhere.csv")
    said, without = pretrained(tmp_path / "without", labelled, without=("data", "split"))
    assert said.count(UNMEASURED) == 1
    assert weights_digest(load_file(without)) == weights_digest(load_file(with_labels))
    card = card_of(without)
    assert card["vocabulary"]["size"] > 50
    assert card_of(with_labels)["probe"] is not None
    assert card == card_of(with_labels) | {"probe": None}
    (tmp_path / "elsewhere.csv").rename(corpus / "news.csv")
    given = merged(labelled.to_dict(), {"pretraining": {"checkpoint": str(without)}})
    assert fedaux.run(Experiment(**given), out=tmp_path / "run").summary["complete"]


@pytest.mark.slow
def test_a_recipe_whose_labelled_data_is_elsewhere_is_told_so(
    tmp_path: Path, pictures: dict[str, Any]
) -> None:
    normal = {"channel_mean": [0.3], "channel_deviation": [0.5]}
    private = {
        "source": "folder",
        "path": "clients/only",
        "test": "held/out",
        "test_fraction": 0.1,
        **normal,
    }
    said, h0 = pretrained(tmp_path / "there", tiny(data=private, auxiliary=pictures))
    for key in ("data.path = 'clients/only'", "data.test = 'held/out'"):
        assert f"{key}: there is no such file or folder in " in said
    assert said.count(DO_WITHOUT) == 2
    assert not h0.exists()
    said, h0 = pretrained(
        tmp_path / "there", tiny(data=private, auxiliary=pictures), "--set", "data.source=none"
    )
    assert UNMEASURED in said
    _, with_labels = pretrained(tmp_path / "with", tiny(data=normal, auxiliary=pictures))
    _, plain = pretrained(tmp_path / "plain", tiny(auxiliary=pictures))
    digests = [weights_digest(load_file(path)) for path in (h0, with_labels, plain)]
    assert digests[0] == digests[1] != digests[2], (
        "numbers subtracted from every image hold for public ones alone, too"
    )


def test_a_misspelt_source_is_told_that_none_is_one_too(
    tmp_path: Path, pictures: dict[str, Any]
) -> None:
    for name, guess in (
        ("foldr", "; did you mean folder?"),
        ("qqq", "; there are digits, tensors, "),
    ):
        private = {"source": name, "path": "clients"}
        said, _ = pretrained(tmp_path / "misspelt", tiny(data=private, auxiliary=pictures))
        assert f"data.source = {name!r}: not known{guess}" in said
        assert DO_WITHOUT in said
        assert DO_WITHOUT not in str(problems_of(tiny(data=private)))


@pytest.mark.parametrize(
    "places", [{"test": "held/out"}, {"path": "mine"}, {"clients": ["a", "b"]}]
)
def test_a_place_without_a_source_is_told_so(
    tmp_path: Path, pictures: dict[str, Any], places: dict[str, Any]
) -> None:
    fields, wrong = inspect({"data": places, "auxiliary": pictures})
    assert wrong == []
    (key,) = places
    line = (
        f"data.source: missing, while data.{key} is given; should be tensors, features, folder, "
        "parquet, csv, jsonl, hugg"
    )
    for federated in (False, True):
        (said,) = problems_of(fields, federated=federated)
        assert said.startswith(line)
        assert "digits" not in said
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({"data": places, "auxiliary": pictures}))
    assert line in invoked(tmp_path, "run", str(recipe))
    said = invoked(tmp_path, "pretrain", str(recipe))
    assert line in said
    assert DO_WITHOUT in said
    with pytest.raises(ConfigError, match=r"data\.source: missing, while"):
        write_folder(tmp_path / "hospitals", recipe=str(recipe), clients=None, trial=False)


def test_nothing_else_of_labelled_data_is_looked_at_where_there_are_none(
    tmp_path: Path, pictures: dict[str, Any]
) -> None:
    private = {
        "clients": ["a", "b", "c"],
        "server_validation": 50,
        "path": "x",
        "split": "y",
        "test": "z",
    }
    recipe = tmp_path / "recipe.toml"
    table = tiny(auxiliary=pictures).to_dict() | {
        "data": private | {"source": "folder"},
        "split": {"num_clients": 7},
    }
    recipe.write_text(tomli_w.dumps(table))
    words = ["pretrain", str(recipe), "--out", str(tmp_path / "h0.safetensors")]
    said = invoked(tmp_path, *words)
    assert "split.num_clients = 7: should be 3, as in data.clients" in said
    assert "data.server_validation: should be 0" in said
    said = invoked(tmp_path, *words, "--set", "data.source=none")
    assert UNMEASURED in said
    _, plain = pretrained(tmp_path / "plain", tiny(auxiliary=pictures))
    assert equal(load_file(tmp_path / "h0.safetensors"), load_file(plain))


def test_what_was_measured_before_is_not_called_unmeasured(tmp_path: Path) -> None:
    said, _ = pretrained(tmp_path, tiny())
    said, h0 = pretrained(tmp_path, tiny(), "--set", "data.source=none")
    assert "(stored)" in said
    assert f"{UNMEASURED} again; the accuracies are from its card in the store" in said
    assert f"{100 * card_of(h0)['probe']['linear']:.1f}" in said
    said, _ = pretrained(tmp_path, tiny(), "--set", "data.source=none", "--no-probe")
    assert UNMEASURED not in said


@pytest.mark.parametrize("name", [*IMAGE_MODELS, "tinybert"])
def test_features_begin_alike_whatever_the_classes(name: str) -> None:
    shape = (16, 100) if name == "tinybert" else (3, 32, 32)
    digests = set()
    for num_classes in (2, 10):
        with seeding.initialisation(0, part=name):
            digests.add(weights_digest(MODELS[name](shape, num_classes).features.state_dict()))
    assert len(digests) == 1


@pytest.mark.parametrize(
    "words", [["run"], ["run", "--set", "seeds=[[0],[1]]"], ["data"], ["privacy"]]
)
def test_whatever_needs_labelled_data_says_so(
    tmp_path: Path, pictures: dict[str, Any], words: list[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tomli_w.dumps({"auxiliary": pictures}))
    said = invoked(tmp_path, words[0], str(recipe), *words[1:])
    assert LEFT_OUT in said
    assert "1 problem " in said
    with pytest.raises(ConfigError, match="data: required except by"):
        fedaux.run(Experiment(auxiliary=pictures), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_who_names_no_public_data_has_the_embedded_pair(pictures: dict[str, Any]) -> None:
    assert Experiment().data.source == "digits"
    assert Experiment(auxiliary={"source": "noise", "size": 9}).data.source == "digits"
    assert (
        Experiment(auxiliary=pictures, data={"size": 9, "channel_mean": [0.5]}).data.source
        == "none"
    )
    assert Experiment(auxiliary=pictures, data={"path": "x"}).data.source == "digits"
    assert (
        Experiment(auxiliary=pictures, data={"source": "folder", "clients": "x"}).data.source
        == "folder"
    )
    written = Experiment(auxiliary=pictures)
    assert Experiment(**written.to_dict()) == written
    assert LEFT_OUT in problems_of(written, federated=True)[0]


def test_public_images_alone_must_fit_too(tmp_path: Path, pictures: dict[str, Any]) -> None:
    noise = {"source": "noise", "size": 80}
    said, _ = pretrained(tmp_path / "noise", tiny(data={"source": "none"}, auxiliary=noise))
    assert "there are no clients' images to take the shape from; set auxiliary.image_size" in said
    said, h0 = pretrained(
        tmp_path / "noise",
        tiny(data={"source": "none"}, auxiliary=noise | {"image_size": 6, "channels": 3}),
    )
    assert card_of(h0)["image_shape"] == [3, 6, 6]
    said, _ = pretrained(
        tmp_path / "mean", tiny(data={"source": "none", "channel_mean": [0.1, 0.2, 0.3]})
    )
    assert "data.channel_mean = [0.1, 0.2, 0.3]: should be 1 numbers, one per channel" in said
    few = tiny(data={"source": "none"}, auxiliary=pictures, pretraining={"kind": "masked"})
    said, _ = pretrained(tmp_path / "kind", few)
    assert "pretraining.kind" in said


def test_an_own_network_is_tried_on_public_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(image_shape: tuple[int, int, int], num_classes: int) -> SplitModel:
        head = torch.nn.Linear(64, num_classes + 1)
        return SplitModel(torch.nn.Flatten(), head, feature_width=64)

    monkeypatch.setitem(MODELS, "wrong", wrong)
    experiment = tiny(data={"source": "none"}, prototypes=[{"name": "wrong", "model": "wrong"}])
    images = load_auxiliary(Auxiliary(size=10))
    with pytest.raises(
        ConfigError, match=r"returns logits \[2, 3\] for two examples, should be \[2, 2\]"
    ):
        check_public(experiment, images, None)
