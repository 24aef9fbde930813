"""What a hostile server can ask of a node: every request goes through the node's real app, as
bytes."""

from __future__ import annotations

import base64
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("flwr", reason="needs the extra flower")
pytest.importorskip("opendp", reason="needs the extra privacy (opendp)")
from flwr.app import Array, ArrayRecord, RecordDict
from helpers.loopback import asked

from fedaux import __version__
from fedaux.config import Certainty, ConfigError, Local, LocalPrivacy, Prototype
from fedaux.core.client import BLANK
from fedaux.core.weights import snapshot
from fedaux.federation import records
from fedaux.federation.node import load_node
from fedaux.federation.terms import PREPARE, TRAIN, Plan, PrepareTerms, TrainTerms
from fedaux.federation.work import own_examples
from fedaux.models import MODELS
from fedaux.privacy.mechanism import integer_mean
from fedaux.privacy.mechanisms import MECHANISMS

CLASSES = ("cat", "cow", "dog")
MODEL = Prototype(name="p", model="cnn", options={"width": 4})


def images(
    folder: Path,
    labels: list[str],
    *,
    seed: int = 0,
    odd: int | None = None,
    broken: int | None = None,
) -> Path:
    """Write one PNG per label; one of another size and mode, one that is no image, if asked for."""
    generator = np.random.default_rng(seed)
    for number, label in enumerate(labels):
        file = folder / label / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if number == broken:
            file.write_bytes(b"not an image")
        elif number == odd:
            Image.fromarray(generator.integers(0, 256, (13, 31, 3), dtype=np.uint8)).save(file)
        else:
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
    return folder


def node(folder: Path, data: Path, **privacy: Any) -> Path:
    """Write a node's configuration with secure noise."""
    table = {
        "client": 0,
        "device": "cpu",
        "threads": 1,
        "classes": list(CLASSES),
        "data": {"source": "folder", "path": str(data), "image_size": 8, "channels": 1},
        "privacy": {"epsilon": 1.0, **privacy},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "node.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    return folder / "node.toml"


def common(**changes: Any) -> dict[str, Any]:
    base = {
        "client": 0,
        "run": "r",
        "seed": 0,
        "prototype": MODEL,
        "mode": "full",
        "image_shape": (1, 8, 8),
        "classes": CLASSES,
    }
    return base | changes


def ask_for_release(
    file: Path, *, classes: tuple[str, ...] = CLASSES, **certainty: Any
) -> RecordDict:
    section = Certainty(**({"components": 4, "epsilon": 0.5} | certainty))
    plan = Plan(run="r", certainty=(section,), releases=1)
    return asked(file, prepare_content(section, plan=plan, classes=classes), PREPARE).content


def prepare_content(
    section: Certainty, *, plan: Plan, classes: tuple[str, ...] = CLASSES
) -> RecordDict:
    model = MODELS["cnn"]((1, 8, 8), len(classes), width=4)
    features = torch.randn(60, model.feature_width, generator=torch.Generator().manual_seed(0))
    mechanism = MECHANISMS[section.mechanism](section.model_copy(update={"components": 4}))
    terms = PrepareTerms(certainty=section, **common(classes=classes, plan=plan))
    content: dict[str, Any] = {
        "terms": records.text_record(terms.model_dump_json()),
        "extractor": records.arrays(snapshot(model.features)),
        "public": records.arrays(mechanism.publish(features, num_classes=len(classes))),
    }
    return RecordDict(content)


def ask_with_map(file: Path, public: dict[str, torch.Tensor], **certainty: Any) -> RecordDict:
    """Ask for a release through a public map of the server's choice."""
    features = MODELS["cnn"]((1, 8, 8), len(CLASSES), width=4).features
    section = Certainty(**({"epsilon": 0.5} | certainty))
    plan = Plan(run="r", certainty=(section,), releases=1)
    terms = PrepareTerms(certainty=section, **common(plan=plan))
    content: dict[str, Any] = {
        "terms": records.text_record(terms.model_dump_json()),
        "extractor": records.arrays(snapshot(features)),
        "public": records.arrays(public),
    }
    return asked(file, RecordDict(content), PREPARE).content


def ask_for_update(
    file: Path,
    *,
    classes: tuple[str, ...] = CLASSES,
    round: int = 1,
    terms: Mapping[str, Any] | None = None,
    **local: Any,
) -> RecordDict:
    """Ask for an update; `terms` are changed in the text that is sent."""
    torch.manual_seed(0)
    model = MODELS["cnn"]((1, 8, 8), len(classes), width=4)
    section = Local(**local)
    plan = Plan(run="r", local=section, updates=1)
    honest = TrainTerms(
        round=round,
        local=section,
        proximal=0.0,
        wire="fp32",
        **common(classes=classes, plan=plan),
    )
    weights = {name: torch.full_like(tensor, 0.01) for name, tensor in snapshot(model).items()}
    text = json.dumps(json.loads(honest.model_dump_json()) | dict(terms or {}))
    content: dict[str, Any] = {
        "terms": records.text_record(text.replace("\\\\ud800", "\\ud800")),
        "weights": records.arrays(weights),
    }
    return asked(file, RecordDict(content), TRAIN).content


def refusal(content: RecordDict) -> str | None:
    return str(content["refusal"]["text"]) if "refusal" in content else None


def shown(content: RecordDict) -> object:
    """Return everything of an answer but noisy numbers: refusal, keys, counts, shapes."""
    if (words := refusal(content)) is not None:
        return words
    said = json.loads(str(content["answer"]["text"]))
    said.pop("loss", None)
    arrays: Any = content.get("release", {})
    return (
        sorted(content),
        said,
        {name: len(array.data) for name, array in arrays.items()},
    )


def spent(file: Path) -> list[dict[str, Any]]:
    ledger = file.parent / "state" / "client-00000" / "ledger.json"
    return list(json.loads(ledger.read_text())["spent"]) if ledger.exists() else []


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"epsilon": 1e-12, "delta": 1e-300}, "certainty.epsilon"),
        ({"epsilon": 0.5, "delta": 1e-300}, "certainty.delta"),
        ({"epsilon": 1e-12, "delta": 1e-5}, "certainty.epsilon"),
        ({"components": 10**9}, "certainty.components"),
        ({"mechanism": "paper", "regularisation": 1e-9}, "certainty.regularisation"),
        ({"mechanism": "paper", "regularisation": 1e300}, "certainty.regularisation"),
    ],
)
def test_settings_outside_the_proofs_are_refused_and_cost_nothing(
    tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4))
    words = refusal(ask_for_release(file, **settings))
    assert words is not None
    assert words.startswith(f"refused: {name} = ")
    assert spent(file) == []


@pytest.mark.parametrize(
    ("privacy", "local", "name"),
    [
        ({"clip": 4e-35}, {}, "local.privacy.clip"),
        ({"clip": 1e30}, {}, "local.privacy.clip"),
        ({"noise_multiplier": 1e-6}, {}, "local.privacy.noise_multiplier"),
        ({"noise_multiplier": 1e12}, {}, "local.privacy.noise_multiplier"),
        ({"delta": 1e-300}, {}, "local.privacy.delta"),
        ({}, {"epochs": 10**9}, "local.epochs"),
        ({}, {"batch_size": 10**9}, "local.batch_size"),
    ],
)
def test_training_settings_outside_the_proofs_are_refused(
    tmp_path: Path, privacy: dict[str, Any], local: dict[str, Any], name: str
) -> None:
    file = node(
        tmp_path / "node",
        images(tmp_path / "data", ["cat", "dog"] * 4),
        epsilon=100.0,
        accountant="renyi",
    )
    words = refusal(ask_for_update(file, privacy=privacy, **local))
    assert words is not None
    assert words.startswith(f"refused: {name}")
    assert spent(file) == []


def test_an_allowed_release_does_not_repeat_or_saturate(tmp_path: Path) -> None:
    """At the smallest epsilon and delta that a node takes, noise is spread as it should be."""
    data = images(tmp_path / "data", ["cat", "dog"] * 4)
    vectors = []
    for number in range(12):
        file = node(tmp_path / f"node-{number}", data)
        content = ask_for_release(file, epsilon=1e-3, delta=1e-12)
        assert refusal(content) is None
        vectors.append(records.some_tensors(content["release"], most_bytes=10**6)["vector"])
    draws = torch.stack(vectors)
    assert len(set(draws.flatten().tolist())) == draws.numel()
    entry = json.loads((tmp_path / "node-0/state/client-00000/ledger.json").read_text())["spent"][
        0
    ]["entry"]
    assert float((draws / entry["sigma"]).std()) == pytest.approx(1.0, abs=0.5)


def test_private_training_draws_every_bit_from_the_operating_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded generators with 32 bits of entropy can be searched through; here nothing is seeded at
    all."""
    pytest.importorskip("opacus")
    data = images(tmp_path / "data", ["cat", "dog"] * 4)
    monkeypatch.setattr(secrets, "randbits", lambda _: 0)
    read: list[int] = []
    real = os.urandom

    def counted(size: int) -> bytes:
        read.append(size)
        return real(size)

    monkeypatch.setattr(os, "urandom", counted)
    weights = []
    for name in ("one", "other"):
        torch.manual_seed(0)
        file = node(tmp_path / name, data, epsilon=100.0, accountant="renyi")
        read.clear()
        content = ask_for_update(
            file, privacy={"noise_multiplier": 2.0}, batch_size=4, learning_rate=1.0
        )
        assert refusal(content) is None
        weights.append(records.some_tensors(content["weights"], most_bytes=10**7))
        (row,) = spent(file)
        parameters = sum(tensor.numel() for tensor in weights[-1].values())
        assert row["entry"]["noise"] == "secure"
        assert sum(read) >= row["entry"]["steps"] * 8 * (parameters + 8)
    assert not any(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


PRIVATE_TWINS = {
    "other classes held": (["cat"] * 4 + ["dog"] * 4, {}),
    "one class only": (["cow"] * 8, {}),
    "a class nobody declared": (["cat"] * 4 + ["horse"] * 4, {}),
    "only undeclared classes": (["horse"] * 8, {}),
    "first image of another size and mode": (["cat", "dog"] * 4, {"odd": 0}),
    "an unreadable image": (["cat", "dog"] * 4, {"broken": 3}),
    "the first one unreadable": (["cat", "dog"] * 4, {"broken": 0}),
}


@pytest.mark.quickly("other classes held", "an unreadable image")
@pytest.mark.parametrize("twin", PRIVATE_TWINS)
def test_no_answer_but_noise_depends_on_private_data(tmp_path: Path, twin: str) -> None:
    """Two nodes declare the same and hold different examples: whatever is asked, they look
    alike."""
    labels, how = PRIVATE_TWINS[twin]
    files = [
        node(
            tmp_path / "one",
            images(tmp_path / "a", ["cat", "dog"] * 4),
            epsilon=50.0,
            accountant="renyi",
            mechanisms=["mean", "classes"],
        ),
        node(
            tmp_path / "two",
            images(tmp_path / "b", labels, **how),
            epsilon=50.0,
            accountant="renyi",
            mechanisms=["mean", "classes"],
        ),
    ]
    for classes in (
        CLASSES,
        CLASSES[::-1],
        CLASSES[:2],
        ("cat",),
        ("horse", "cat", "dog"),
        (*CLASSES, "horse"),
    ):
        for mechanism in ("mean", "classes"):
            answers = [
                shown(ask_for_release(file, classes=classes, mechanism=mechanism, epsilon=0.5))
                for file in files
            ]
            assert answers[0] == answers[1], classes
            assert isinstance(answers[0], str) == (set(classes) != set(CLASSES))
    if pytest.importorskip("opacus"):
        answers = [
            shown(ask_for_update(file, privacy={"noise_multiplier": 2.0}, batch_size=4))
            for file in files
        ]
        assert answers[0] == answers[1]
        assert not isinstance(answers[0], str)


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)).save(
        file, "PNG"
    )
    return file.getvalue()


def rows_of(labels: list[object]) -> list[dict[str, object]]:
    return [
        {"image": base64.b64encode(png(row)).decode(), "label": label}
        for row, label in enumerate(labels)
    ]


LAST_ROWS: dict[str, dict[str, object]] = {
    "a name among numbers": {"image": base64.b64encode(png(9)).decode(), "label": "horse"},
    "a stray number": {"image": base64.b64encode(png(9)).decode(), "label": "90000"},
    "a number of many digits": {"image": base64.b64encode(png(9)).decode(), "label": "9" * 5000},
    "another field": {"img": "", "label": "01", "class": "02"},
    "no label": {"image": base64.b64encode(png(9)).decode()},
    "nothing": {},
}


@pytest.mark.parametrize("last", LAST_ROWS)
@pytest.mark.parametrize("count", [0, 7])
def test_one_row_decides_about_itself_alone(tmp_path: Path, last: str, count: int) -> None:
    """Labels are names or numbers, columns there or not, row by row: the other rows are read as
    before."""
    good = rows_of([f"0{row % 3}" for row in range(count + 1)])
    read = []
    for name, rows in (("one", good), ("two", [*good[:count], LAST_ROWS[last]])):
        place = tmp_path / name / "train.jsonl"
        place.parent.mkdir()
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = node(tmp_path / f"node-{name}", place.parent)
        text = file.read_text().replace(
            '"folder"', '"jsonl"\nimage_column = "image"\nlabel_column = "label"'
        )
        file.write_text(
            text.replace('"cat",', '"0",').replace('"cow",', '"1",').replace('"dog",', '"2",')
        )
        examples = own_examples(load_node(file), ("0", "1", "2"))
        assert examples.images.shape == (count + 1, 1, 8, 8)
        read.append(examples)
    assert torch.equal(read[0].labels[:count], read[1].labels[:count])
    assert torch.equal(read[0].images[:count], read[1].images[:count])
    assert int(read[1].labels[count]) == BLANK


def test_the_first_bytes_do_not_decide_how_the_other_rows_are_read(tmp_path: Path) -> None:
    """A simulation reads a file that begins with a mark of UTF-16 as UTF-16; a node does not."""
    rows = [json.dumps(row).encode() for row in rows_of(["cat"] * 5)]
    place = tmp_path / "train.jsonl"
    place.write_bytes(b"\n".join([b"\xff\xfe" + rows[0], *rows[1:]]) + b"\n")
    file = node(tmp_path / "node", tmp_path)
    columns = '"jsonl"\nimage_column = "image"\nlabel_column = "label"'
    file.write_text(file.read_text().replace('"folder"', columns))
    examples = own_examples(load_node(file), CLASSES)
    assert sorted(examples.labels.tolist()) == [BLANK, *[CLASSES.index("cat")] * 4]


@pytest.mark.parametrize("stray", [-5, 3, 90_000])
def test_one_label_of_tensors_decides_about_itself_alone(tmp_path: Path, stray: int) -> None:
    labels = torch.tensor([0, 1, 2, 1, stray])
    save_file(
        {"images": torch.ones(5, 1, 8, 8, dtype=torch.uint8), "labels": labels},
        tmp_path / "own.safetensors",
    )
    file = node(tmp_path / "node", tmp_path / "own.safetensors")
    text = file.read_text().replace('"folder"', '"tensors"')
    file.write_text(
        text.replace('"cat",', '"0",').replace('"cow",', '"1",').replace('"dog",', '"2",')
    )
    assert own_examples(load_node(file), ("0", "1", "2")).labels.tolist() == [0, 1, 2, 1, BLANK]


def test_an_opening_quote_does_not_swallow_the_rows_after_it(tmp_path: Path) -> None:
    """It would tell by the number of examples, which costs nothing, what one row holds."""
    answers = []
    for name, third in (("one", b"hello"), ("two", b'"hello')):
        rows = [",".join(map(str, row.values())).encode() for row in rows_of(["cat"] * 30)]
        place = tmp_path / name
        place.mkdir()
        rows[3] = third
        (place / "train.csv").write_bytes(b"".join(row + b"\n" for row in [b"image,label", *rows]))
        file = node(tmp_path / f"node-{name}", place, epsilon=50.0)
        file.write_text(file.read_text().replace('"folder"', '"csv"'))
        answers.append(shown(ask_for_release(file)))
    assert answers[0] == answers[1]
    assert not isinstance(answers[0], str)


def test_jsonl_needs_its_columns_declared(tmp_path: Path) -> None:
    """Otherwise one row with a field of another usual name would decide where the images of all
    are."""
    file = node(tmp_path / "node", tmp_path)
    file.write_text(file.read_text().replace('"folder"', '"jsonl"'))
    with pytest.raises(ConfigError, match="image_column"):
        load_node(file)


@pytest.mark.parametrize("count", [1, 4])
def test_a_folder_of_unreadable_images_answers_like_any_other(tmp_path: Path, count: int) -> None:
    good = images(tmp_path / "good", ["cat"] * count)
    bad = images(tmp_path / "bad", ["cat"] * count)
    for picture in bad.rglob("*.png"):
        picture.write_bytes(b"")
    (bad / "dog").mkdir()
    files = [node(tmp_path / place.name / "node", place, epsilon=50.0) for place in (good, bad)]
    answers = [shown(ask_for_release(file)) for file in files]
    assert answers[0] == answers[1]
    assert not isinstance(answers[0], str)


def test_blank_examples_contribute_nothing_and_count(tmp_path: Path) -> None:
    """The noiseless release of n examples with b blank ones is that of the others, times (n - b) /
    n."""
    vectors = []
    for name, labels in (("whole", ["cat"] * 6), ("half", ["cat"] * 6 + ["horse"] * 6)):
        file = node(
            tmp_path / name, images(tmp_path / f"{name}-data", labels), mechanisms=["mean", "paper"]
        )
        examples = own_examples(load_node(file), CLASSES)
        mechanism = MECHANISMS["mean"](Certainty(components=4))
        public = mechanism.publish(torch.randn(60, 64, generator=torch.Generator().manual_seed(0)))
        features = examples.images.flatten(1).float() / 255
        features = features.masked_fill((examples.labels == BLANK)[:, None], torch.nan)
        vectors.append((integer_mean(mechanism.project(features, public)), len(examples.labels)))
    assert vectors[1][1] == 2 * vectors[0][1]
    assert torch.allclose(2 * vectors[1][0], vectors[0][0], atol=1e-9)


def test_requests_chosen_after_answers_end_at_the_budget(tmp_path: Path) -> None:
    """A release of half of the budget, then DP-SGD as long as the node answers: the filter
    decides."""
    pytest.importorskip("opacus")
    from fedaux.privacy.filters import FILTERS
    from fedaux.privacy.ledger import LedgerEntry

    file = node(
        tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4), accountant="renyi"
    )
    assert refusal(ask_for_release(file, epsilon=0.5)) is None
    rounds = 0
    while (
        refusal(
            ask_for_update(file, round=rounds + 1, privacy={"noise_multiplier": 40.0}, batch_size=4)
        )
        is None
    ):
        rounds += 1
    entries = [LedgerEntry.from_json(row["entry"]) for row in spent(file)]
    assert len(entries) == 1 + rounds
    assert rounds >= 1
    assert FILTERS["renyi"](epsilon=1.0, delta=1e-5)(entries)[0] <= 1.0
    assert FILTERS["renyi"](epsilon=1.0, delta=1e-5)([*entries, entries[-1]])[0] > 1.0


@pytest.mark.parametrize(("budget", "paid"), [(0.3, 0), (0.7, 1), (0.9, 2)])
def test_a_refusal_tells_neither_the_budget_nor_what_was_spent(
    tmp_path: Path, budget: float, paid: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the budget is and whatever was spent, a server that asks too much reads the same."""
    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4), epsilon=budget)
    for number in range(paid):
        assert refusal(ask_for_release(file, epsilon=0.5, components=4 + number)) is None
    words = refusal(ask_for_release(file, epsilon=0.8, components=8))
    assert words == "refused: this request does not fit this node's privacy budget"
    (log,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert f"privacy.epsilon = {budget:g}" in log.message
    assert not log.exc_info


@pytest.mark.parametrize("attack", ["shape", "missing", "integers"])
def test_a_map_that_fails_tells_nothing_of_the_budget(tmp_path: Path, attack: str) -> None:
    """A release that fails costs nothing: asked for at many prices, it would tell the budget by
    whether it fails or does not fit."""
    public = dict(WHOLE_MAP)
    if attack == "shape":
        public["whitening"] = torch.ones(WIDTH)
    elif attack == "missing":
        del public["bound"]
    else:
        public["whitening"] = torch.ones(WIDTH, 2**16 + 1, dtype=torch.uint8)
    answers = set()
    for budget, paid in ((0.3, 0), (0.7, 1), (0.7, 0)):
        place = tmp_path / f"{budget}-{paid}"
        file = node(place, images(place / "data", ["cat", "dog"] * 4), epsilon=budget)
        assert paid == 0 or refusal(ask_for_release(file, epsilon=0.5)) is None
        answers |= {refusal(ask_with_map(file, public, epsilon=one)) for one in (0.1, 0.6, 90.0)}
        assert len(spent(file)) == paid
    (words,) = answers
    assert str(words).startswith("refused: ")


def test_a_tensor_whose_name_is_half_a_letter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = records.arrays

    def changed(tensors: Mapping[str, torch.Tensor]) -> ArrayRecord:
        one = arrays(tensors)[records.ALL]
        data = one.data.replace(b'"centre"', b'"\\ud800"')
        return ArrayRecord({records.ALL: Array(one.dtype, one.shape, one.stype, data)})

    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4))
    monkeypatch.setattr(records, "arrays", changed)
    words = refusal(ask_with_map(file, WHOLE_MAP))
    assert words == "refused: tensor ? of type F32 is not valid"
    assert spent(file) == []


EDITS: dict[str, Any] = {
    "a price": lambda ledger, _: ledger["spent"][0]["entry"].update(epsilon=0.01),
    "its noise": lambda ledger, _: ledger["spent"][0]["entry"].update(sigma=99.0),
    "a row": lambda ledger, _: ledger["spent"].clear(),
    "a line of the record": lambda _, lines: lines.__delitem__(0),
    "the price in a line": lambda _, lines: lines.__setitem__(
        0, lines[0].replace('"epsilon": 0.1', '"epsilon": 0.01')
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_node_whose_books_were_edited_releases_nothing(tmp_path: Path, edit: str) -> None:
    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4))
    for components in (4, 5):
        answer = ask_for_release(file, epsilon=0.1, components=components)
        assert refusal(answer) is None
    folder = file.parent / "state/client-00000"
    ledger = json.loads((folder / "ledger.json").read_text())
    lines = (folder / "sent.jsonl").read_text().splitlines()
    EDITS[edit](ledger, lines)
    (folder / "ledger.json").write_text(json.dumps(ledger))
    (folder / "sent.jsonl").write_text("".join(f"{line}\n" for line in lines))
    words = refusal(ask_for_release(file, epsilon=0.1, components=6))
    assert words == "the node failed; see its log"
    assert json.loads((folder / "ledger.json").read_text()) == ledger


def test_both_versions_are_named_where_they_differ(tmp_path: Path) -> None:
    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4))
    plan = Plan(run="r", certainty=(Certainty(),), releases=1)
    terms = PrepareTerms(certainty=Certainty(), **common(plan=plan)).model_dump(mode="json")
    for changes, words in (
        ({"version": "9.9", "new": 1}, f"the server runs fedaux 9.9, this node {__version__}"),
        ({"version": None}, f"the server runs fedaux an older version, this node {__version__}"),
        ({"new": 1}, "refused: the terms of the request are not valid"),
    ):
        text = json.dumps(terms | changes)
        answer = asked(file, RecordDict({"terms": records.text_record(text)}), PREPARE)
        assert words in str(refusal(answer.content))


def test_a_request_that_departs_from_its_plan_is_refused(tmp_path: Path) -> None:
    file = node(
        tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4), plain_updates=True
    )
    plan = Plan(run="r", certainty=(Certainty(epsilon=0.1),), releases=1)
    content = prepare_content(Certainty(epsilon=0.5, components=4), plan=plan)
    words = refusal(asked(file, content, PREPARE).content)
    assert words == "refused: certainty: not the settings in the plan of this run"
    assert spent(file) == []
    planned = Local().model_dump(mode="json")
    for changes, expected in (
        ({"epochs": 3}, "refused: local: not the settings in the plan of this run"),
        ({"privacy": {"noise_multiplier": 0.2}}, "refused: local: not the settings in the plan"),
        ({"optimizer": "sgd", "learning_rate": 0.1}, None),  # a method's own
    ):
        words = refusal(ask_for_update(file, terms={"local": planned | changes}))
        assert words == expected or str(words).startswith(str(expected))


def test_training_outside_the_proofs_is_refused_before_scores_are_paid(
    tmp_path: Path,
) -> None:
    file = node(
        tmp_path / "node",
        images(tmp_path / "data", ["cat", "dog"] * 4),
        epsilon=50.0,
        accountant="renyi",
    )
    section = Certainty(epsilon=0.5, components=4)
    local = Local(privacy=LocalPrivacy(noise_multiplier=2.0), epochs=10**9)
    plan = Plan(run="r", certainty=(section,), releases=1, local=local, updates=1)
    words = refusal(asked(file, prepare_content(section, plan=plan), PREPARE).content)
    assert words is not None
    assert words.startswith("refused: local.epochs: steps per update")
    assert spent(file) == []


def test_answers_say_nothing_of_time(tmp_path: Path) -> None:
    file = node(
        tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4), plain_updates=True
    )
    said = json.loads(str(ask_for_update(file)["answer"]["text"]))
    assert sorted(said) == ["client", "loss", "num_examples"]


def test_unprotected_updates_need_the_owners_word(tmp_path: Path) -> None:
    file = node(tmp_path / "node", images(tmp_path / "data", ["cat", "dog"] * 4))
    words = refusal(ask_for_update(file))
    assert words is not None
    assert "updates without DP-SGD do not leave this node" in words


MALFORMED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a proximal term beyond single precision": ({}, {"proximal": 1e300}, "proximal = 1e+300"),
    "a rate beyond single precision": (
        {"learning_rate": 1e300},
        {},
        "plan.local.learning_rate = 1e+300",
    ),
    "a batch beyond 64 bits": ({"batch_size": 2**64}, {}, "plan.local.batch_size = 1.84467e+19"),
    "more epochs than can be done": ({"epochs": 2**31 - 1}, {}, "local.epochs: steps per update"),
    "numbers that end in infinity": (
        {"learning_rate": 1e29, "epochs": 4, "optimizer": "sgd", "optimizer_state": "kept"},
        {},
        "training with these weights and settings ends in NaN or infinity",
    ),
    "a batch beyond any float": ({}, {"batch_size": 10**400}, "batch_size = 1e+308"),
    "half a letter": ({}, {"run": "\\ud800"}, "the terms of the request"),
}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("what", MALFORMED)
def test_requests_that_cannot_be_computed_are_refused_with_a_reason(
    tmp_path: Path, what: str, private: bool
) -> None:
    """They failed, after a look at the budget; "the node failed" names no reason."""
    local, terms, words = MALFORMED[what]
    if private and "infinity" in words:
        pytest.skip("a private update is paid for, and says nothing by being refused")
    file = node(
        tmp_path / "node",
        images(tmp_path / "data", ["cat", "dog"] * 4),
        epsilon=100.0,
        accountant="renyi",
        plain_updates=True,
    )
    if private:
        local = local | {"privacy": {"noise_multiplier": 100.0}}
    answer = refusal(ask_for_update(file, terms=terms, **local))
    assert answer is not None
    assert answer.startswith(f"refused: {words}")
    assert spent(file) == []


WIDTH = 32
"""Features of the model that is asked for here."""
WHOLE_MAP = {
    "centre": torch.zeros(WIDTH),
    "whitening": torch.ones(WIDTH, 2),
    "bound": torch.ones(()),
}
HOSTILE_SHAPES: dict[str, tuple[str, dict[str, torch.Tensor]]] = {
    "examples along the axis that is clipped": (
        "mean",
        {"centre": torch.zeros(WIDTH), "whitening": torch.ones(WIDTH), "bound": torch.ones(1, 1)},
    ),
    "a row of the map per example": (
        "mean",
        {
            "centre": torch.zeros(8, WIDTH),
            "whitening": torch.ones(WIDTH, 2),
            "bound": torch.ones(()),
        },
    ),
    "a bound per example": (
        "paper",
        {"bound": torch.ones(8, 1), "negatives": torch.zeros(1, WIDTH)},
    ),
    "negatives of another rank": (
        "paper",
        {"bound": torch.ones(()), "negatives": torch.zeros(1, 1, WIDTH)},
    ),
    "class sums without a number of classes": ("classes", WHOLE_MAP),
    "class sums of a row per example": (
        "classes",
        WHOLE_MAP | {"classes": torch.tensor(3), "centre": torch.zeros(8, WIDTH)},
    ),
    "class sums of many classes": ("classes", WHOLE_MAP | {"classes": torch.tensor(2**40)}),
    "class sums of no number": ("classes", WHOLE_MAP | {"classes": torch.tensor(torch.nan)}),
}


@pytest.mark.parametrize("attack", HOSTILE_SHAPES)
@pytest.mark.parametrize("count", [1, 8])
def test_maps_that_broadcast_are_refused_and_cost_nothing(
    tmp_path: Path, attack: str, count: int
) -> None:
    """With whitening [F] and a bound [1, 1] the release had one number per example, and noise for a
    mean of all."""
    mechanism, public = HOSTILE_SHAPES[attack]
    data = images(tmp_path / "data", ["cat"] * count)
    file = node(tmp_path / "node", data, mechanisms=[mechanism])
    assert refusal(ask_with_map(file, public, mechanism=mechanism)) is not None
    assert spent(file) == []


def test_class_sums_are_booked_within_the_budget_and_may_be_denied(tmp_path: Path) -> None:
    """A node books them as what they are, answers the same request again for nothing, refuses what
    its budget does not cover, and refuses all of them if its operator does not name them."""
    data = images(tmp_path / "data", ["cat", "dog", "horse"] * 3)
    file = node(tmp_path / "node", data, mechanisms=["mean", "classes"])

    def ask() -> RecordDict:
        torch.manual_seed(0)  # the same h0
        return ask_for_release(file, mechanism="classes", epsilon=0.8, components=4)

    first, again = ask(), ask()
    vectors = [
        records.some_tensors(one["release"], most_bytes=10**6)["vector"] for one in (first, again)
    ]
    assert torch.equal(*vectors)
    assert vectors[0].shape == (len(CLASSES) * 5,)
    (row,) = spent(file)
    entry = row["entry"]
    assert (entry["mechanism"], entry["purpose"], entry["noise"]) == (
        "classes",
        "class sums",
        "secure",
    )
    assert (entry["sensitivity"], entry["epsilon"], entry["num_examples"]) == (2.0, 0.8, 9)
    words = refusal(ask_for_release(file, mechanism="mean", epsilon=0.8))
    assert words is not None
    assert words == "refused: this request does not fit this node's privacy budget"
    denied = node(tmp_path / "denied", data)
    words = refusal(ask_for_release(denied, mechanism="classes"))
    assert words == "refused: certainty.mechanism = classes: not allowed by this node"
    assert spent(denied) == []
