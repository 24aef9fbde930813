"""Files that are damaged, badly written or larger than needed: messages name the
place, or left alone."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import torch
from helpers.image_files import image_folder, pixels, png, write_csv
from safetensors.torch import save_file

from fedaux.config import Auxiliary, Data
from fedaux.data import load_auxiliary, load_labelled
from fedaux.data.lines import open_csv, open_jsonl
from fedaux.data.tables import number_labels


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


def encoded_rows(count: int) -> list[str]:
    return [base64.b64encode(png(image)).decode() for image in pixels(count, side=6)]


def test_what_is_wrong_with_a_matlab_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "train_32x32.mat"
    section = Data(source="svhn", path=str(file))

    def write(labels: list[float], images: np.ndarray) -> None:
        content = {"X": images.transpose(2, 3, 1, 0), "y": np.array(labels)[:, None]}
        scipy.io.savemat(file, content, do_compression=True)

    write([1.0, 10.0, 3.0], pixels(3))  # whole numbers may be written as double
    data = load_labelled(section)
    assert sorted([*data.labels.tolist(), *data.test_labels.tolist()]) == [0, 1, 3]
    write([1.0, 2.5, 3.0], pixels(3))
    with pytest.raises(
        ValueError, match=r"32x32\.mat, row 1: the label 2\.5 is not one of the 10 classes"
    ):
        load_labelled(section)
    write([1.0, 2.0, float("nan")], pixels(3))
    with pytest.raises(ValueError, match=r"32x32\.mat, row 2: the label is missing"):
        load_labelled(section)
    write([1.0, 2.0, 3.0], pixels(3) / 255)
    with pytest.raises(ValueError, match=r"32x32\.mat: X is double; should be uint8"):
        load_labelled(section)
    write([1.0, 2.0, 3.0], pixels(3))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"32x32\.mat: not a readable MATLAB file"):
        load_labelled(section)


def test_numbers_with_gaps_that_no_classes_leave_are_refused(tmp_path: Path) -> None:
    rows = [
        {"image": cell, "label": str(number % 4)} for number, cell in enumerate(encoded_rows(12))
    ]
    section = Data(source="csv", path=str(tmp_path / "own.csv"))
    for label, classes in (
        ("7", 8),
        ("999", 1000),
    ):  # a client with a few of the classes of ImageNet
        rows[5]["label"] = label
        write_csv(tmp_path / "own.csv", rows)
        assert len(load_labelled(section).classes) == classes
    rows[5]["label"] = "99999"
    write_csv(tmp_path / "own.csv", rows)
    with pytest.raises(
        ValueError,
        match=r"data\.path = .*own\.csv: row 5 has the label 99999, the highest, the next is 3: "
        r"only 5 of "
        r"100000 classes would have an example; should be",
    ):
        load_labelled(section)
    found, names, bad = number_labels(
        list(range(0, 30_000, 9)), classes=None
    )  # a test file of many classes
    assert (len(found), len(names), bad) == (3334, 29_998, {})
    tensors = {"images": torch.from_numpy(pixels(3)), "labels": torch.tensor([0, 5000, 1])}
    save_file(tensors, tmp_path / "own.safetensors")
    with pytest.raises(
        ValueError, match=r"tensor labels: row 1 has the label 5000, the highest, the next is 1"
    ):
        load_labelled(Data(source="tensors", path=str(tmp_path / "own.safetensors")))


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_rows_that_cannot_be_read_stop_or_are_skipped_and_counted(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = encoded_rows(10)
    lines = [
        json.dumps({"image": cell, "label": "caf\u00e9"}, ensure_ascii=False) for cell in cells
    ]
    if source == "csv":
        lines = ["image,label", *(f"{cell},caf\u00e9" for cell in cells)]
    content = [line.encode() for line in lines]
    content[-3] = lines[-3].encode("latin-1")
    if source == "jsonl":
        content[-2] = content[-2][:-9]
        content[-1] = b"[1, 2]"
    file = tmp_path / f"own.{source}"
    file.write_bytes(b"\n".join(content) + b"\n")
    section = Data(source=source, path=str(file), test_fraction=0.2)
    with pytest.raises(ValueError, match=rf"own\.{source}, row 7: not UTF-8; "):
        load_labelled(section)
    data = load_labelled(section.model_copy(update={"skip_bad": True}))
    skipped = 3 if source == "jsonl" else 1
    assert data.classes == ("caf\u00e9",)
    assert len(data.labels) + len(data.test_labels) == 10 - skipped
    assert (
        f"skipped {skipped} of 10 rows, first: {file}, row 7: not UTF-8" in capsys.readouterr().err
    )
    assert len(load_auxiliary(Auxiliary(source=source, path=str(file), size=7))) == 7
    file.write_bytes("\n".join(lines).encode("utf-16"))
    assert load_labelled(section).classes == ("caf\u00e9",)


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_rows_of_a_table_are_chosen_by_their_ids(tmp_path: Path, source: str) -> None:
    images = pixels(5, side=6)
    wnids = [
        "n02099601",
        "n03179701",
        "n02099601",
        "n02099601",
        "n03179701",
    ]  # three dogs, two desks
    rows = [
        {"image": cell, "wnid": wnid} for cell, wnid in zip(encoded_rows(5), wnids, strict=True)
    ]
    file = tmp_path / f"own.{source}"

    def write_rows() -> None:
        if source == "csv":
            write_csv(file, rows)
        else:
            file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    write_rows()
    section = Auxiliary(source=source, path=str(file), wordnet="dogs")
    assert (load_auxiliary(section).numpy() == images[[0, 2, 3]]).all()
    assert (load_auxiliary(section.model_copy(update={"size": 2})).numpy() == images[[0, 2]]).all()
    content = file.read_bytes().replace(
        b"n03179701", b"n0317970\xe9", 1
    )  # the second row is not UTF-8
    file.write_bytes(content)
    skipping = section.model_copy(update={"skip_bad": True})
    assert (load_auxiliary(skipping).numpy() == images[[0, 2, 3]]).all()
    rows[1]["wnid"] = "desk"
    write_rows()
    with pytest.raises(
        ValueError, match=r"auxiliary\.wordnet = dogs: row 1 has 'desk'; should be a WordNet id"
    ):
        load_auxiliary(section)
    rows[:] = [{"image": row["image"]} for row in rows]
    write_rows()
    with pytest.raises(
        ValueError, match=rf"auxiliary\.wordnet = dogs: .*own\.{source} has no column wnid"
    ):
        load_auxiliary(section)


def test_what_lies_beyond_the_size_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = image_folder(tmp_path / "set" / "train", {"a": 9})["a"]
    held = image_folder(tmp_path / "set" / "test", {"a": 5}, seed=9)["a"]
    for name in ("train/a/1.png", "train/a/8.png", "test/a/4.png"):
        (tmp_path / "set" / name).write_bytes(b"rubbish")
    public = Auxiliary(source="folder", path=str(tmp_path / "set"), size=1)
    assert (load_auxiliary(public).numpy() == made[:1]).all()
    public = public.model_copy(update={"size": 4})
    with pytest.raises(ValueError, match=r"1\.png: cannot be decoded"):
        load_auxiliary(public)
    for _ in range(2):  # decoded, then from the cache
        kept = load_auxiliary(public.model_copy(update={"skip_bad": True}))
        assert (kept.numpy() == made[[0, 2, 3, 4]]).all()
        assert "skipped 1 of 5 rows, first: " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"1\.png: cannot be decoded"):  # from the cache, too
        load_auxiliary(public)
    sizes = sorted(file.stat().st_size for file in (tmp_path / "cache").rglob("examples.bin"))
    assert sizes == [1 * made[0].size, 4 * made[0].size]
    section = Data(source="folder", path=str(tmp_path / "set"), size=1, test_size=4)
    data = load_labelled(section)
    assert (data.images.numpy() == made[:1]).all()
    assert (data.test_images.numpy() == held[:4]).all()
    with pytest.raises(ValueError, match=r"auxiliary\.size = 8: should be at most 7"):
        load_auxiliary(public.model_copy(update={"skip_bad": True, "size": 8}))


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_rows_of_a_table_beyond_the_size_are_not_parsed(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"{number}.png" for number in range(7)]
    for name, image in zip(names, pixels(7, side=6), strict=True):
        (tmp_path / name).write_bytes(png(image))
    texts = ["a" * (number + 1) for number in range(7)]
    rows = [
        json.dumps({"file": name, "text": text}) for name, text in zip(names, texts, strict=True)
    ]
    if source == "csv":
        rows = ["file,text", *(f"{name},{text}" for name, text in zip(names, texts, strict=True))]
    (tmp_path / f"train-0.{source}").write_text(
        "\n".join(["", *rows, ""]) if source == "jsonl" else "\n".join(rows)
    )
    second = tmp_path / f"train-1.{source}"
    second.write_bytes(b"\xe9\xe8\n[1]\n{oops\n")
    section = Auxiliary(source=source, path=str(tmp_path), split="train")
    opened = open_csv if source == "csv" else open_jsonl
    every = section.model_copy(update={"skip_bad": True, "size": 7})
    if source == "jsonl":
        whole = load_auxiliary(every).numpy()
        with pytest.raises(ValueError, match=r"train-1\.jsonl, row 0: not UTF-8"):
            load_auxiliary(section)
    else:
        with pytest.raises(ValueError, match=r"train-1\.csv: its header is not UTF-8"):
            load_auxiliary(every)
        second.unlink()
        whole = load_auxiliary(section).numpy()
        second.write_bytes(b"\xe9\xe8\n")
    assert (whole == pixels(7, side=6)).all()
    for size in (1, 3, 7):
        few = section.model_copy(update={"size": size})
        assert (load_auxiliary(few).numpy() == whole[:size]).all()
        table = opened(str(tmp_path), "train", few, True)
        assert table is not None
        assert [content for _, content in table.entries()] == texts[:size]
        pictures = opened(str(tmp_path), "train", few, False)
        assert pictures is not None
        assert [file.name for file in pictures.files if file.suffix == ".png"] == names[:size]
    second.unlink()
    (tmp_path / "2.png").write_bytes(b"rubbish")
    skipping = section.model_copy(update={"size": 3, "skip_bad": True})
    assert (load_auxiliary(skipping).numpy() == whole[[0, 1, 3]]).all(), (
        "a later row takes the place of a bad one"
    )
    assert "skipped 1 of 4 rows" in capsys.readouterr().err
    (tmp_path / "2.png").write_bytes(png(whole[2]))
    with pytest.raises(ValueError, match=r"auxiliary\.size = 8: should be at most 7"):
        load_auxiliary(section.model_copy(update={"size": 8}))


def test_classes_are_those_of_all_rows_whatever_the_size(tmp_path: Path) -> None:
    rows = [
        {"image": cell, "label": name} for cell, name in zip(encoded_rows(6), "ccbbaa", strict=True)
    ]
    write_csv(tmp_path / "train.csv", rows)
    write_csv(tmp_path / "test.csv", rows[:2])
    data = load_labelled(Data(source="csv", path=str(tmp_path), size=3))
    assert data.classes == ("a", "b", "c")
    assert data.labels.tolist() == [2, 2, 1]


def test_a_column_may_begin_after_the_size(tmp_path: Path) -> None:
    rows = [{"title": "one"}, {"title": "two"}, {"body": "three"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    section = Auxiliary(
        source="jsonl", path=str(tmp_path / "own.jsonl"), text_column=("title", "body"), size=2
    )
    table = open_jsonl(str(tmp_path / "own.jsonl"), "train", section, True)
    assert table is not None
    assert [content for _, content in table.entries()] == ["one", "two"]
