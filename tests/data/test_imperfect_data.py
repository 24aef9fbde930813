"""Data as people have it: empty paths and folders, odd sizes, other encodings, IDX files."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.experiments import tiny
from helpers.image_files import pixels, png, write_csv
from PIL import Image
from pydantic import ValidationError

import fedaux
from fedaux.config import Auxiliary, ConfigError, Data, Experiment
from fedaux.data import load_auxiliary, load_labelled, notes
from fedaux.data.folders import open_folder
from fedaux.data.texts import text_of
from fedaux.report.run import Run
from fedaux.report.warnings import warnings_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


def grey(place: Path, *, side: int = 6, value: int = 7) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((side, side), value, dtype=np.uint8)).save(place)


@pytest.mark.parametrize(
    "key",
    [
        *("data.path", "data.test", "data.clients", "data.split"),
        *("auxiliary.path", "auxiliary.split", "text.vocabulary"),
        *("pretraining.checkpoint", "output.directory"),
    ],
)
def test_an_empty_path_is_an_error(key: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf'{key}(\.0)? = "": is empty; should be'):
        Experiment(**{section: {name: [""] if name == "clients" else ""}})


def test_most_images_decide_about_the_size_and_skipped_rows_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        for number in range(6):
            grey(tmp_path / "own" / name / f"{number}.png", value=10 * number)
    grey(tmp_path / "own" / "a" / "0.png", side=9)
    section = Data(source="folder", clients=(str(tmp_path / "own"),), skip_bad=True)
    for _ in range(2):  # decoded, then from the cache
        with notes.collected() as found:
            data = load_labelled(section)
        assert data.images.shape[1:] == (1, 6, 6)
        assert len(data.labels) + len(data.test_labels) == 11
        (entry,) = found.skipped
        assert entry["place"] == f"data.clients = {tmp_path / 'own'}"
        assert (entry["setting"], entry["skipped"], entry["rows"]) == ("data.skip_bad", 1, 12)
        assert "0.png: 9x9 pixels, most have 6x6; set data.image_size" in entry["reasons"][0]
    assert f"data.clients = {tmp_path / 'own'}: skipped 1 of 12 rows" in capsys.readouterr().err
    whole = load_labelled(section.model_copy(update={"image_size": 5}))
    assert len(whole.labels) + len(whole.test_labels) == 12
    public = Auxiliary(source="folder", path=str(tmp_path / "own"), skip_bad=True, size=3)
    assert load_auxiliary(public)[:, 0, 0, 0].tolist() == [10, 20, 30]


@pytest.mark.usefixtures("pages")
def test_a_run_records_skipped_rows_and_warnings_and_reports_them(tmp_path: Path) -> None:
    images = pixels(40, side=8).mean(axis=1).astype(np.uint8)
    for number, image in enumerate(images):
        place = tmp_path / "own" / "ab"[number % 2] / f"{number:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place)
    (tmp_path / "own/a/00.png").write_bytes(b"rubbish")
    (tmp_path / "own/empty").mkdir()
    experiment = tiny(
        method="fedavg",
        rounds=1,
        data={"source": "folder", "path": str(tmp_path / "own"), "skip_bad": True},
        split={"num_clients": 2},
    )
    fedaux.run(experiment, out=tmp_path / "run")
    recorded = json.loads((tmp_path / "run/data.json").read_text())
    assert [(one["skipped"], one["rows"]) for one in recorded["skipped"]] == [(1, 40)]
    assert recorded["warnings"] == [
        f"data.path = {tmp_path / 'own'}: class folders without images: empty"
    ]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Rows that were skipped: 1 of 40." in page
    assert "data.skip_bad" in page
    assert "class folders without images: empty" in page
    assert recorded["test"]["examples"] == 8
    assert recorded["test"]["largest_class"] >= 0.5


def test_a_method_at_chance_is_warned_of() -> None:
    rows = [
        {"method": name, "accuracy_mean": accuracy}
        for name, accuracy in (("fedaux", 0.266), ("fedavg+p", 0.3), ("feddf", None))
    ]
    test = {"examples": 1000, "largest_class": 0.25}
    run = Run("run", "", {}, {}, [], {}, {"rows": rows}, {}, None, notes={"test": test})
    (line,) = warnings_of(run)
    assert line.startswith("fedaux: at chance, 26.6 % in the last round where the most frequent")


def test_empty_class_folders_and_leftovers_of_archives_stop_nothing(tmp_path: Path) -> None:
    place = tmp_path / "own"
    for name in ("cold", "flu"):
        for number in range(5):
            grey(place / name / f"{number}.png")
    grey(place / "__MACOSX" / "cold" / "0.png")
    grey(place / "cold" / "__MACOSX" / "0.png")
    grey(place / "cold" / ".ipynb_checkpoints" / "0.png")
    (place / "cold" / ".DS_Store").write_bytes(b"\0")
    (place / "well").mkdir()
    with notes.collected() as found:
        data = load_labelled(Data(source="folder", path=str(place)))
    assert data.classes == ("cold", "flu", "well")
    assert len(data.labels) + len(data.test_labels) == 10
    assert found.warnings == [f"data.path = {place}: class folders without images: well"]
    assert len(load_auxiliary(Auxiliary(source="folder", path=str(place)))) == 10


def test_one_warning_for_each_surprise_in_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, test = (str(tmp_path / name) for name in ("one", "other", "test"))
    for place, names in ((one, ["Sandal", "boot"]), (other, ["sandal"]), (test, ["boot", "clog"])):
        for name in names:
            for number in range(4):
                grey(Path(place) / name / f"{number}.png")
    image = pixels(1, side=6)[0]
    for name in ("8.png", "9.png"):
        (tmp_path / "one" / "Sandal" / name).write_bytes(png(image))
    frames = [Image.new("L", (6, 6), value) for value in (10, 200)]
    for name in ("6.gif", "7.gif"):
        frames[0].save(tmp_path / "other/sandal" / name, save_all=True, append_images=frames[1:])
    grey_rgb = np.repeat(image[:1], 3, axis=0)
    (tmp_path / "other" / "sandal" / "5.png").write_bytes(png(grey_rgb))  # loses nothing
    section = Data(source="folder", clients=(one, other), test=test)
    for _ in range(2):  # decoded, then from the cache
        with notes.collected() as found:
            load_labelled(section)
        assert found.warnings == [
            f"data.clients = {one}: coloured images became grey, as the first image is; set "
            f"data.channels to 3, or to 1 to keep this (first: {one}/Sandal/8.png)",
            f"data.clients = {other}: images with several frames; only the first frame is used "
            f"(first: {other}/sandal/6.gif)",
            "data: class names that differ only in case are different classes: Sandal and sandal",
            "data: no client trains on these classes of the test data: clog (50.0% of the test "
            "examples)",
        ]
        assert capsys.readouterr().err.count("Warning: ") == 4
    with notes.collected() as found:
        load_labelled(section.model_copy(update={"channels": 1}))
    assert not [line for line in found.warnings if "grey" in line]


def test_text_files_in_other_encodings_and_without_an_extension(tmp_path: Path) -> None:
    place = tmp_path / "mail" / "talk"
    place.mkdir(parents=True)
    for name, encoding in (
        ("51060", "utf-8"),
        ("51061", "utf-8-sig"),
        ("51062", "utf-16"),
        ("51063.txt", "latin-1"),
    ):
        (place / name).write_bytes("ein Café".encode(encoding))
    section = Data(source="folder", path=str(tmp_path / "mail"))
    table = open_folder(str(tmp_path / "mail"), "train", section, True)
    assert table is not None
    contents = [content for _, content in table.entries()]
    assert [text_of(content, encoding="cp1252") for content in contents] == ["ein Café"] * 4
    with pytest.raises(ValueError, match=r"not UTF-8; should be saved as UTF-8, or set `encoding`"):
        text_of(contents[3])
    with pytest.raises(ValueError, match="not UTF-8"):  # declared, so nothing is guessed
        text_of(contents[2], encoding="utf-8")
    with pytest.raises(ValidationError, match=r"should be an encoding of Python, such as latin-1"):
        Data(encoding="latin-one")


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_tables_in_other_encodings(tmp_path: Path, source: str) -> None:
    for number, image in enumerate(pixels(4, side=6)):
        (tmp_path / f"{number}.png").write_bytes(png(image))
    rows = [{"image": f"{number}.png", "label": "für"} for number in range(4)]
    write_csv(tmp_path / "own.csv", rows)
    if source == "jsonl":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        (tmp_path / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    file = tmp_path / f"own.{source}"
    text = file.read_text(encoding="utf-8")
    section = Data(source=source, path=str(file), encoding="latin-1")
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "latin-1"):
        file.write_bytes(text.encode(encoding))
        assert load_labelled(section).classes == ("für",)
    with pytest.raises(ValueError, match=r"row 0: not UTF-8; .* set `encoding`"):
        load_labelled(section.model_copy(update={"encoding": None}))
    with pytest.raises(ValueError, match=rf"own\.{source}: not valid ascii"):
        load_labelled(section.model_copy(update={"encoding": "ascii"}))


def idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files_as_of_mnist(tmp_path: Path, packed: bool) -> None:
    images = pixels(9, side=5)[:, 0, :, :4].copy()
    labels = np.arange(9, dtype=np.uint8) % 3

    def write(name: str, content: bytes) -> Path:
        file = tmp_path / (f"{name}.gz" if packed else name)
        file.write_bytes(gzip.compress(content) if packed else content)
        return file

    file = write("train-images-idx3-ubyte", idx(images[:6]))
    write("train-labels-idx1-ubyte", idx(labels[:6]))
    write("t10k-images-idx3-ubyte", idx(images[6:]))
    write("t10k-labels-idx1-ubyte", idx(labels[6:]))
    data = load_labelled(Data(source="idx", path=str(tmp_path)))
    assert torch.equal(data.images, torch.from_numpy(images[:6, None]))
    assert torch.equal(data.test_images, torch.from_numpy(images[6:, None]))
    assert data.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.test_labels.tolist() == [0, 1, 2]
    public = load_auxiliary(Auxiliary(source="idx", path=str(file), channels=3, size=2))
    assert public.shape == (2, 3, 5, 4)
    write("train-labels-idx1-ubyte", idx(labels[:5]))
    with pytest.raises(ValueError, match=r"labels-idx1-ubyte.*: 5 labels for 6 images"):
        load_labelled(Data(source="idx", path=str(tmp_path)))
    write("train-images-idx3-ubyte", idx(images[:6])[:-3])
    with pytest.raises(ValueError, match=r"117 bytes after the header, should be 120; incomplete"):
        load_auxiliary(Auxiliary(source="idx", path=str(tmp_path)))
    write("train-images-idx3-ubyte", b"PNG")
    with pytest.raises(ValueError, match=r"an IDX file of images begins with 00 00 08 03"):
        load_auxiliary(Auxiliary(source="idx", path=str(tmp_path)))
    if packed:
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(ValueError, match=r"not a readable gzip file"):
            load_auxiliary(Auxiliary(source="idx", path=str(tmp_path)))
