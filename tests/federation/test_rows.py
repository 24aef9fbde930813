"""Hostile rows at a node: replacing one changes neither n nor what any other row becomes."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fedaux.config import ConfigError, Data
from fedaux.core.client import BLANK
from fedaux.data import SOURCES, load_rows, rows
from fedaux.federation.check import check_node
from fedaux.federation.node import NODE_SOURCES, load_node
from fedaux.federation.work import count_examples, own_examples

CLASSES = ("0", "1", "2")
GOOD = 4
"""Rows that stay as they are."""
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", "")


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


IMAGES = [png(seed) for seed in range(GOOD + 1)]
CELLS = [base64.b64encode(image).decode() for image in IMAGES]


def node(place: Path, source: str, path: Path, **data: object) -> Path:
    """Write the configuration of a node."""
    shape = {} if source == "features" else {"image_size": 8, "channels": 1}
    table = {
        "client": 0,
        "device": "cpu",
        "classes": list(CLASSES),
        "data": {"source": source, "path": str(path), **shape, **data},
    }
    (place / "node.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    return place / "node.toml"


def examples_of(file: Path) -> Counter[tuple[int, bytes]]:
    """Return a node's examples as a multiset of labels and pixels."""
    config = load_node(file)
    found = own_examples(config, CLASSES)
    assert count_examples(config) == len(found.labels)
    pairs = zip(found.labels.tolist(), found.images.numpy(), strict=True)
    return Counter((label, image.tobytes()) for label, image in pairs)


def table_of(place: Path, source: str, lines: list[bytes]) -> Path:
    """Write a table with an image file beside it, and a node that reads it."""
    (place / "beside.png").write_bytes(IMAGES[0])
    header = [b"image,label"] if source == "csv" else []
    (place / f"own.{source}").write_bytes(b"".join(line + b"\n" for line in [*header, *lines]))
    columns = {"image_column": "image", "label_column": "label"}
    return node(place, source, place / f"own.{source}", **columns)


def good_line(source: str, number: int) -> bytes:
    label = number % 3
    if source == "csv":
        return f"{CELLS[number]},{label}".encode()
    return json.dumps({"image": CELLS[number], "label": label}).encode()


ODD_TEXTS = st.one_of(
    st.sampled_from(
        [
            *("", " ", '"', '""', '"a', 'a"b', ",", ",,", "a,b,c", "\r", "\0", "\ufeff", "x" * 300),
            *("0", "-1", "3", "90000", "9" * 5000, "1e400", "nan", "train", "../own.csv", "//etc"),
            *(
                "[/red]",
                "beside.png",
                "//etc/hosts",
                "/dev/zero",
                "/proc/self/environ",
                ".",
                "a/" * 400,
            ),
        ]
    ),
    st.text(max_size=30),
)
ODD_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), ODD_TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS, inner, max_size=3),
    max_leaves=5,
)
KEYS = st.one_of(st.sampled_from(["image", "label", "img", "bytes", "path"]), st.text(max_size=5))
LINES = {
    "csv": st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda image, label: f"{image},{label}".encode(errors="replace"), *[ODD_TEXTS] * 2
        ),
        st.builds(lambda label: f"{CELLS[-1]},{label}".encode(errors="replace"), ODD_TEXTS),
    ),
    "jsonl": st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda held: json.dumps(held).encode(), st.dictionaries(KEYS, ODD_VALUES, max_size=4)
        ),
        st.builds(
            lambda label: json.dumps({"image": CELLS[-1], "label": label}).encode(), ODD_VALUES
        ),
        st.sampled_from(
            [b"[" * 100_000, b'{"image": "\\ud800", "label": "\\ud800"}', b"\xff\xfe{}"]
        ),
    ),
}


@pytest.mark.parametrize("source", LINES)
@given(data=st.data(), at=st.integers(0, GOOD))
@FEW
def test_a_hostile_line_is_one_row_and_decides_about_itself_alone(
    source: str, data: st.DataObject, at: int
) -> None:
    hostile = data.draw(LINES[source]).replace(b"\n", b"")
    lines = [good_line(source, number) for number in range(GOOD)]
    with tempfile.TemporaryDirectory() as place:
        others = examples_of(table_of(Path(place), source, lines))
        assert sum(others.values()) == GOOD
        assert all(label != BLANK for label, _ in others)
        lines.insert(at, hostile)
        file = table_of(Path(place), source, lines)
        found = examples_of(file)
        assert sum(found.values()) == GOOD + 1
        assert others <= found
        config = file.read_text().replace("[data]", "[data]\nskip_bad = true")
        file.write_text(config)
        check_node(file)  # and its operator can look at it


@pytest.mark.parametrize("source", LINES)
def test_a_row_that_is_too_long_or_not_allowed_is_one_bad_row(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [good_line(source, number) for number in range(3)]
    longest = max(map(len, lines)) + 1
    others = examples_of(table_of(tmp_path, source, lines))
    monkeypatch.setattr(rows, "MOST_ROW_BYTES", longest)
    for line in (b"x" * longest, b"x" * (longest - 1), b'"' * (3 * longest + 1)):
        found = examples_of(table_of(tmp_path, source, [lines[0], line, *lines[1:]]))
        assert sum(found.values()) == 4
        assert others <= found


@pytest.mark.parametrize("source", LINES)
def test_the_last_line_has_an_end_as_all_others(source: str, tmp_path: Path) -> None:
    """Without it, an empty last row would not count."""
    file = table_of(tmp_path, source, [good_line(source, 0)])
    table = tmp_path / f"own.{source}"
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(ValueError, match="the last line has no line break at its end; add one"):
        examples_of(file)


def test_a_fifo_in_a_table_is_one_bad_row(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.png")
    for source, line in (
        ("csv", b"fifo.png,1"),
        ("jsonl", b'{"image": "fifo.png", "label": 1}'),
    ):
        found = examples_of(table_of(tmp_path, source, [good_line(source, 0), line]))
        assert found.total() == 2
        assert found[BLANK, bytes(64)] == 1


NAMES = st.one_of(
    st.sampled_from(
        [".hidden.png", "a.txt", "Thumbs.db", "train", "__MACOSX", "x.png", "[red]", "\udcff"]
    ),
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20
    ).filter(lambda name: name not in (".", "..", "000.png")),
)
FOLDERS = st.one_of(st.sampled_from([*CLASSES, "train", "test", ".hidden", "__MACOSX"]), NAMES)


@given(
    folder=FOLDERS,
    name=NAMES,
    kind=st.sampled_from(
        [
            "image",
            "bytes",
            "empty",
            "link",
            "lost link",
            "loop",
            "folder",
            "class",
            "fifo",
            "locked",
        ]
    ),
    content=st.binary(max_size=50),
)
@example(folder="1", name="x.png", kind="link", content=b"")
@FEW
def test_a_hostile_name_in_a_folder_is_one_row(
    folder: str, name: str, kind: str, content: bytes
) -> None:
    with tempfile.TemporaryDirectory() as outer:
        place = Path(outer) / "data"
        for number in range(GOOD):
            (place / CLASSES[number % 3]).mkdir(parents=True, exist_ok=True)
            (place / CLASSES[number % 3] / f"{number:03d}.png").write_bytes(IMAGES[number])
        file = node(Path(outer), "folder", place, skip_bad=True)
        others = examples_of(file)
        (place / folder).mkdir(exist_ok=True)
        own = place / folder / name
        if kind in ("image", "locked"):
            own.write_bytes(IMAGES[-1])
            own.chmod(0 if kind == "locked" else 0o600)
        elif kind in ("bytes", "empty"):
            own.write_bytes(content if kind == "bytes" else b"")
        elif kind == "fifo":
            os.mkfifo(own)
        elif kind in ("folder", "class"):
            own.mkdir()
            if kind == "class":
                (own / "000.png").write_bytes(IMAGES[0])
        else:
            targets = {"link": place / "0" / "000.png", "lost link": Path("no"), "loop": Path(name)}
            own.symlink_to(targets[kind])
        found = examples_of(file)
        assert found.total() == GOOD + 1
        assert others <= found
        if kind != "image" or folder not in CLASSES:
            assert (found - others).total() == 1
        check_node(file)


@given(stray=st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats()), seed=st.integers(0, 9))
@FEW
def test_a_hostile_row_of_tensors_decides_about_itself_alone(stray: int | float, seed: int) -> None:
    kind = torch.float64 if isinstance(stray, float) else torch.int64
    pixels = torch.randint(0, 256, (GOOD + 1, 1, 8, 8), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as place:
        held = []
        for labels in ([0, 1, 2, 1, 0], [0, 1, 2, 1, stray]):
            tensors = {"images": pixels, "labels": torch.tensor(labels, dtype=kind)}
            save_file(tensors, Path(place) / "own.safetensors")
            held.append(examples_of(node(Path(place), "tensors", Path(place) / "own.safetensors")))
            pixels = pixels.clone()
            pixels[-1] = seed
        assert held[0].total() == held[1].total()
        assert (held[0] - held[1]).total() <= 1


@pytest.mark.parametrize("label", [b"0", b"7", b"\xff", None, b"9" * 5000])
@pytest.mark.parametrize("numbers", [None, [None, 2], [0, 2**63 - 1]])
def test_a_hostile_row_of_features_decides_about_itself_alone(
    label: bytes | None, numbers: list[int | None] | None, tmp_path: Path
) -> None:
    """A missing number makes doubles of all; 2^53 + 2^29 + 1 rounds otherwise by way of them."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    from pyarrow import parquet

    file = node(tmp_path, "features", tmp_path / "own.parquet")
    found = []
    for own, last in (([1, 2], b"0"), (numbers, label)):
        features = [[2**53 + 2**29 + 1, 0], [2**62 + 2**38 + 1, 5], own]
        texts = pyarrow.array([b"1", b"2", last], pyarrow.binary())
        cells = pyarrow.array(features, pyarrow.list_(pyarrow.int64(), 2))
        columns = {"features": cells, "label": texts.view(pyarrow.string())}
        parquet.write_table(pyarrow.table(columns), tmp_path / "own.parquet")
        examples = own_examples(load_node(file), CLASSES)
        pairs = zip(examples.labels.tolist(), examples.images.tolist(), strict=True)
        found.append(Counter((one, tuple(row)) for one, row in pairs))
    assert found[0].total() == found[1].total() == 3
    assert (found[0] - found[1]).total() <= 1


@pytest.mark.parametrize("source", [name for name in SOURCES if name not in NODE_SOURCES])
def test_other_sources_are_refused_by_a_node(source: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"data\.source = '{source}': a node reads folder, csv"):
        load_node(node(tmp_path, source, tmp_path))


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_a_contained_table_names_only_files_below_its_folder(tmp_path: Path, source: str) -> None:
    folder, outside = tmp_path / "data", tmp_path / "secret.png"
    (folder / "images").mkdir(parents=True)
    for file in (outside, folder / "images/own.png"):
        file.write_bytes(png(0))
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to("loop.png")
    good = ["images/own.png", "images/../images/own.png"]
    names = [*good, str(outside), "../secret.png", "link.png", "loop.png", "a\0b"]
    lines = [json.dumps({"image": name, "label": "cat"}) for name in names]
    if source == "csv":
        lines = ["image,label", *(f"{name},cat" for name in names)]
    (folder / f"train.{source}").write_text("".join(f"{line}\n" for line in lines))
    columns: dict[str, Any] = {"image_column": "image", "label_column": "label"}
    columns |= {"image_size": 8, "channels": 1}
    section = Data(source=source, path=str(folder), skip_bad=True, encoding="utf-8", **columns)
    data, total = load_rows(section)
    assert (len(data.labels), total) == (5, 7)
    data, total = load_rows(section.model_copy(update={"contained": True}))
    assert (len(data.labels), total) == (2, 7)
