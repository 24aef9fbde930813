"""Whole runs on texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tokenizers", reason="needs the extra text")

from helpers.corpus import TOPICS, news, texts_of, write_csv

import fedaux
from fedaux.config import ConfigError, Experiment
from fedaux.data import load_both, load_private


def rows_of(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.usefixtures("pages")
def test_a_federation_of_texts_learns(corpus: Path, tmp_path: Path) -> None:
    experiment = texts_of(
        corpus, rounds=4, method=["fedavg", "fedaux"], local={"epochs": 8, "learning_rate": 1e-2}
    )
    result = fedaux.run(experiment, out=tmp_path / "run")
    best = {row["method"]: row["accuracy_max_mean"] for row in result.summary["rows"]}
    assert best["fedavg"] > 0.7  # of three topics
    assert best["fedaux"] > 0.5
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(name in page for name in TOPICS)
    split = json.loads((tmp_path / "run" / "split.json").read_text())
    assert split["classes"] == list(TOPICS)


@pytest.mark.parametrize(
    ("mode", "methods"), [("full", ["fedavg", "fedaux+m"]), ("linear", ["fedavg+p", "fedaux+m"])]
)
def test_the_fast_engine_equals_the_plain_loop(
    corpus: Path, tmp_path: Path, mode: str, methods: list[str]
) -> None:
    found = []
    for name, engine in (
        ("plain", {"clients_at_once": 1}),
        ("fast", {"clients_at_once": 8, "threads": 2}),
    ):
        experiment = texts_of(corpus, mode=mode, method=methods, engine=engine)
        fedaux.run(experiment, out=tmp_path / name)
        found.append(rows_of(tmp_path / name))
    torch.set_num_threads(1)
    assert len(found[0]) == 2 * len(methods)
    for plain, fast in zip(*found, strict=True):
        assert fast["clients_answered"] == plain["clients_answered"]
        assert fast["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert fast["local_loss"] == pytest.approx(plain["local_loss"], rel=1e-4)
        assert fast["accuracy"] == pytest.approx(plain["accuracy"], abs=0.05)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_figures(corpus: Path, tmp_path: Path) -> None:
    whole = texts_of(corpus, method=["fedaux", "feddf+p"])
    fedaux.run(whole, out=tmp_path / "whole")

    class Interrupted(Exception):
        pass

    class Callback:
        def phase(self, task: Any, round: int, name: str) -> None:
            if round == 2 and name == "distill":
                raise Interrupted

        def round(self, row: Any) -> None:
            pass

    with pytest.raises(Interrupted):
        fedaux.run(whole, out=tmp_path / "parts", callback=Callback())
    fedaux.run(whole, out=tmp_path / "parts", resume=True)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_fedaux2_rehearses_public_texts_shorter_than_the_private_ones(
    corpus: Path, tmp_path: Path
) -> None:
    lengths = {"length": 16, "auxiliary_length": 8}
    found = []
    for name, at_once in (("plain", 1), ("fast", 8)):
        experiment = texts_of(
            corpus, method=["fedaux2"], text=lengths, engine={"clients_at_once": at_once}
        )
        data, public = load_both(experiment)
        assert public.shape[1] < data.images.shape[1]
        fedaux.run(experiment, out=tmp_path / name)
        found.append(rows_of(tmp_path / name))
    for plain, fast in zip(*found, strict=True):
        assert fast["local_loss"] == pytest.approx(plain["local_loss"], rel=1e-4)
        assert fast["loss"] == pytest.approx(plain["loss"], rel=1e-4)


def test_a_run_begins_with_the_checkpoints_weights(
    checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    prototype = {"name": "given", "model": "bert", "options": {"checkpoint": str(checkpoint)}}
    experiment = texts_of(corpus, prototypes=[prototype], method=["fedavg+p", "fedavg"], rounds=1)
    found = load_private(experiment).vocabulary
    assert found is not None
    assert found.origin == str(checkpoint / "tokenizer.json")
    fedaux.run(experiment, out=tmp_path / "run")
    assert not (tmp_path / "run" / "pretrained").exists()  # nothing was trained
    with pytest.raises(ConfigError, match=r"was trained with another one; should be its own"):
        fedaux.run(
            texts_of(corpus, prototypes=[prototype], text={"vocabulary": "auxiliary"}),
            out=tmp_path / "other",
        )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"prototypes": [{"name": "a", "model": "cnn"}]},
            "prototypes.model = 'cnn': is for images",
        ),
        ({"text": {"length": 3}}, "text.length = 3: should be greater than or equal to 4"),
        (
            {"pretraining": {"kind": "contrastive"}},
            "pretraining.kind = 'contrastive': is for images",
        ),
        (
            {"pretraining": {"kind": "next-token"}},
            '"next-token": removed in fedaux 0.3.0; should be',
        ),
        ({"text": {"length": 64}}, "at most positions = 32"),
        (
            {"text": {"vocabulary": "./nowhere"}},
            "text.vocabulary = './nowhere': there is no such folder",
        ),
        (
            {"prototypes": [{"name": "a", "model": "bert", "options": {"causal": 1}}]},
            "should be true or false",
        ),
        (
            {"prototypes": [{"name": "a", "model": "bert", "options": {"pooling": 1}}]},
            "should be a text",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_told_before_anything_is_written(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    write_csv(corpus / "news.csv", [("goal " * 90, "sport"), *news(60)])
    with pytest.raises(ValueError, match=told):
        fedaux.run(texts_of(corpus, **changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("section", "source"),
    [
        ("data", "digits"),
        ("auxiliary", "letters"),
        ("data", "svhn"),
        ("data", "tensors"),
        ("auxiliary", "tensors"),
    ],
)
def test_images_are_not_taken_for_texts(
    corpus: Path, tmp_path: Path, section: str, source: str
) -> None:
    settings = texts_of(corpus).to_dict()
    path = {"path": str(corpus)} if source in ("svhn", "tensors") else {}
    wrong = Experiment(**settings | {section: {"source": source, **path}})
    with pytest.raises(
        ConfigError, match=f"{section}.source = '{source}': has no texts; should be folder, "
    ):
        fedaux.run(wrong, out=tmp_path / "run")
    del settings["text"]
    with pytest.raises(
        ConfigError, match=r"prototypes.model = 'bert': is for texts; add the table \[text\]"
    ):
        fedaux.run(Experiment(**settings), out=tmp_path / "run")
