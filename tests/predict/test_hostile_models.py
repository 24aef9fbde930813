"""Files of models that were changed at random or on purpose: one clear error, and no memory."""

from __future__ import annotations

import csv
import io
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.typing_commands import called
from PIL import Image
from safetensors.torch import load_file

import fedaux
from fedaux.data.tensor_files import save_tensors
from fedaux.formatting import cell
from fedaux.predict.files import FORMAT
from fedaux.report.tables import Table, to_csv

CARD: dict[str, Any] = {
    **{"name": "n", "method": "fedavg", "seed": 0, "prototype": "p", "model": "cnn"},
    **{"options": {"width": 4}, "input_shape": [1, 8, 8], "mode": "full", "classes": ["a", "b"]},
    "input": {"kind": "image", "mean": [0.5], "deviation": [0.25], "columns": []},
    **{"batch_normalisation": "stored", "batch_size": 64, "device": "cpu", "precision": "float32"},
    "accuracy": {"last": 0.5, "max": None, "test_examples": 3},
    "privacy": {"epsilon": 0.1, "delta": 1e-5, "not_protected": "updates"},
    "versions": {"fedaux": "0", "torch": "0", "python": "0"},
}
TEXT = {"kind": "text", "length": 8, "tokenizer": {"digest": "x"}}
ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 10**30, 1e308, "", "\ud800", "x" * 1000, [], {}, [[]], {"a": 1}),
    *([0], [1, 8, 8, 8], [-1, 8, 8], [2**24] * 3, ["a", 1], "inf", "nan", "../../etc/passwd"),
]


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(fedaux.MODELS["cnn"]((1, 8, 8), 2, width=4).state_dict())


def written(path: Path, card: object, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    text = card if isinstance(card, str) else json.dumps(card)
    save_tensors(path, tensors or weights(), metadata={"format": FORMAT, "card": text})
    return path


def places_in(value: object, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a card."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [before, *(place for key, one in inner for place in places_in(one, (*before, key)))]


def changed_card(draw: random.Random) -> object:
    """Return a card with one value replaced, removed or nested."""
    card: Any = json.loads(json.dumps(CARD))
    place = draw.choice(places_in(card)[1:])
    holder = card
    for key in place[:-1]:
        holder = holder[key]
    kind = draw.randrange(4)
    if kind == 0:
        del holder[place[-1]]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice(["width", "layers", "hidden", "x"])] = draw.choice(ODD)
    else:
        holder[place[-1]] = draw.choice(ODD)
    return card


def changed_file(path: Path, draw: random.Random) -> Path:
    """Write a file of a model with one change: of its card, its tensors, its header or any byte."""
    kind = draw.randrange(5)
    if kind == 0:
        return written(path, changed_card(draw))
    if kind == 1:
        tensors = weights()
        name = draw.choice(sorted(tensors))
        change = draw.randrange(4)
        if change == 0:
            del tensors[name]
        elif change == 1:
            tensors[name] = tensors[name].flatten()[:1]
        elif change == 2:
            tensors[name] = tensors[name].to(draw.choice([torch.int8, torch.float64, torch.bool]))
        else:
            tensors[draw.choice(["x", "head.bias2", "features.\u00e9"])] = torch.zeros(2)
        return written(path, CARD, tensors)
    content = bytearray(written(path, CARD).read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    if kind == 2:
        for _ in range(draw.choice([1, 3, 20])):
            content[draw.randrange(header)] = draw.randrange(256)
    elif kind == 3:
        del content[draw.randrange(len(content)) :]
    else:
        old = draw.choice(
            [b'"F32"', b'"shape"', b"data_offsets", b"__metadata__", b"[4]", b"features"]
        )
        new = draw.choice([b'"F8_E8M0"', b'"BOOL"', b'"I64"', b'"F4"', b"[0]", b'"a"', b"null"])
        changed = content[8:header].replace(old, new, draw.choice([1, 100]))
        content = bytearray(struct.pack("<Q", len(changed))) + changed + content[header:]
    path.write_bytes(content)
    return path


def tried(path: Path) -> str | None:
    """Load a model and use it; return the error if it is refused."""
    try:
        model = fedaux.load(path)
    except ValueError as error:
        told = str(error)
    else:
        images = torch.zeros(2, *model.card["input_shape"], dtype=torch.uint8)
        assert model(images).shape == (2, len(model.classes))
        assert repr(model)
        return None
    assert str(path) in told
    return told


@pytest.mark.parametrize("seed", range(8))
def test_changed_files_of_models_are_refused_or_work(tmp_path: Path, seed: int) -> None:
    assert tried(written(tmp_path / "model.safetensors", CARD)) is None
    draw = random.Random(seed)
    refused = [tried(changed_file(tmp_path / "model.safetensors", draw)) for _ in range(40)]
    assert sum(one is not None for one in refused) > 20


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"options": {"width": 2**20}}, r"size mismatch for .*\[1048576"),
        ({"model": "mlp", "options": {"hidden": [2**40]}}, "options.hidden|weights do not fit"),
        (
            {"model": "bert", "input_shape": [8, 2**24], "options": {}, "input": TEXT},
            "the network has more than the",
        ),
        (
            {"model": "bert", "input_shape": [8, 9], "options": {"layers": 10**9}, "input": TEXT},
            "the network has more than the",
        ),
        ({"input_shape": [2**40, 8, 8]}, "input_shape.0: Input should be less than or equal"),
        ({"input_shape": [2**20, 8, 8], "model": "mlp"}, "weights do not fit the model 'mlp'"),
        ({"options": {"width": True}}, "weights do not fit"),
        ({"options": {"depth": 1}}, "weights do not fit .*unexpected keyword argument 'depth'"),
        ({"input": {"kind": "image", "mean": [1, 2]}}, "input.mean and input.deviation"),
        ({"input": {"kind": "image", "deviation": [0]}}, r"input.deviation.0: .*greater than 0"),
        ({"classes": []}, "classes: List should have at least 1 item"),
        ({"batch_normalisation": "batch"}, "statistics of each batch .* fedaux 0.2.0 was the last"),
        ({"accuracy": None}, "accuracy: Input should be"),
        ({"seed": "0"}, "seed: Input should be a valid integer"),
    ],
)
def test_what_a_card_asks_for_is_checked_before_it_is_made(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    file = written(tmp_path / "model.safetensors", CARD | change)
    with pytest.raises(ValueError, match=problem):
        fedaux.load(file)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "1", '{"a":', "NaN", '{"seed": 1' + "0" * 5000 + "}"]
)
def test_a_card_that_is_none_is_one_error(tmp_path: Path, text: str) -> None:
    file = written(tmp_path / "model.safetensors", text)
    with pytest.raises(ValueError, match="its card is damaged"):
        fedaux.load(file)


def test_texts_and_images_have_what_they_need(tmp_path: Path) -> None:
    for change, problem in (
        ({"input": {"kind": "text"}}, "texts need a shape of two numbers"),
        ({"input": TEXT, "input_shape": [8, 30]}, "weights do not fit|a tokenizer belongs"),
    ):
        with pytest.raises(ValueError, match=problem):
            fedaux.load(written(tmp_path / "model.safetensors", CARD | change))
    tensors = load_file(written(tmp_path / "model.safetensors", CARD))
    metadata = {"format": FORMAT, "card": json.dumps(CARD), "tokenizer": "{}"}
    save_tensors(tmp_path / "model.safetensors", tensors, metadata=metadata)
    with pytest.raises(ValueError, match="its tokenizer is not the one of its card"):
        fedaux.load(tmp_path / "model.safetensors")


def test_no_cell_of_a_table_is_a_formula(tmp_path: Path) -> None:
    """Names of files and classes come from others, and spreadsheets compute what begins with =."""
    assert [cell(value) for value in ("=1+1", "+a", "-b", "@c", "\td", "\re")] == [
        "'=1+1", "'+a", "'-b", "'@c", "'\td", "'\re"
    ]  # fmt: skip
    kept = ["-0.5", "+1e-3", "-3.2 %", "nan", "-inf", "a=b", ""]
    assert [cell(value) for value in kept] == kept
    assert to_csv(Table(headers=["=a", "b"], rows=[["@x", "-1.5"]])) == "'=a,b\n'@x,-1.5\n"
    written(tmp_path / "model.safetensors", CARD | {"classes": ["=cmd()", "-b"]})
    (tmp_path / "=scans").mkdir()
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    (tmp_path / "=scans" / "one.png").write_bytes(buffer.getvalue())
    done = called("predict", "model.safetensors", "=scans", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows[1][0] == "'=scans/one.png"
    assert rows[1][2] in ("'=cmd()", "'-b")
