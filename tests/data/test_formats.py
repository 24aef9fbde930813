"""Every format is written here by hand, as its description says, and read back by the package."""

from __future__ import annotations

import base64
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from helpers.experiments import tiny
from helpers.image_files import image_folder, pixels, png, write_csv
from helpers.programs import run_program
from PIL import Image

import fedaux
from fedaux.config import Auxiliary, Data
from fedaux.data import (
    SOURCES,
    LabelledData,
    Source,
    count_labelled,
    load_auxiliary,
    load_labelled,
)
from fedaux.data.decoding import decode
from fedaux.data.tables import number_labels
from fedaux.running.preflight import problems_of


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


# ---------------------------------------------------------------- the makers' own distributions


def cifar_record(image: np.ndarray, *labels: int) -> bytes:
    """One record: the label bytes, then 1024 bytes of red, of green and of blue, each row by
    row."""
    record = bytearray(labels)
    for plane in range(3):
        for row in range(32):
            record += bytes(int(value) for value in image[plane, row])
    return bytes(record)


def test_cifar10_binary(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    images = pixels(9)
    for batch in range(3):
        rows = range(3 * batch, 3 * batch + 3)
        content = b"".join(cifar_record(images[row], row) for row in rows)
        (folder / f"data_batch_{batch + 1}.bin").write_bytes(content)
    (folder / "test_batch.bin").write_bytes(cifar_record(images[4], 9))
    section = Data(source="cifar10-binary", path=str(tmp_path))
    data = load_labelled(section)
    assert (data.images.numpy() == images).all()
    assert data.labels.tolist() == list(range(9))
    assert (data.test_images.numpy() == images[4]).all()
    assert data.classes == tuple("0123456789")
    assert count_labelled(section) == 9
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
    assert load_labelled(section).classes == tuple(names)
    public = load_auxiliary(Auxiliary(source="cifar10-binary", path=str(folder), size=5))
    assert (public.numpy() == images[:5]).all()
    (folder / "data_batch_2.bin").write_bytes(content[:-1])
    (problem,) = problems_of(tiny(data={"source": "cifar10-binary", "path": str(tmp_path)}))
    assert "data_batch_2.bin: 9218 bytes are not a whole number of records of 3073 bytes" in problem


def test_cifar100_binary_has_two_labels(tmp_path: Path) -> None:
    images = pixels(4)
    labels = [(19, 99), (0, 3), (7, 42), (7, 0)]
    content = [cifar_record(image, *pair) for image, pair in zip(images, labels, strict=True)]
    (tmp_path / "train.bin").write_bytes(b"".join(content[:3]))
    (tmp_path / "test.bin").write_bytes(content[3])
    (tmp_path / "fine_label_names.txt").write_text(
        "\n".join(f"fine {number}" for number in range(100))
    )
    fine = load_labelled(Data(source="cifar100-binary", path=str(tmp_path)))
    assert (fine.images.numpy() == images[:3]).all()
    assert fine.labels.tolist() == [99, 3, 42]
    assert (len(fine.classes), fine.classes[42]) == (100, "fine 42")
    coarse = load_labelled(
        Data(source="cifar100-binary", path=str(tmp_path), label_column="coarse")
    )
    assert (coarse.labels.tolist(), coarse.test_labels.tolist(), len(coarse.classes)) == (
        [19, 0, 7],
        [7],
        20,
    )
    with pytest.raises(ValueError, match="has fine and coarse"):
        load_labelled(Data(source="cifar100-binary", path=str(tmp_path), label_column="rough"))


def test_a_label_beyond_the_classes_of_cifar_is_named(tmp_path: Path) -> None:
    content = b"".join(
        cifar_record(image, label) for image, label in zip(pixels(3), (1, 10, 2), strict=True)
    )
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"data_batch_1\.bin, row 1: the label 10 is outside the range 0 \.\. 9"
    ):
        load_labelled(Data(source="cifar10-binary", path=str(tmp_path)))


def stl_bytes(image: np.ndarray) -> bytes:
    """Planes one after another, each of them column by column."""
    return bytes(
        int(image[plane, row, column])
        for plane in range(3)
        for column in range(96)
        for row in range(96)
    )


def test_stl10_binary(tmp_path: Path) -> None:
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    images = pixels(6, side=96)
    (folder / "train_X.bin").write_bytes(b"".join(stl_bytes(image) for image in images[:3]))
    (folder / "train_y.bin").write_bytes(bytes([1, 10, 5]))
    (folder / "test_X.bin").write_bytes(stl_bytes(images[3]))
    (folder / "test_y.bin").write_bytes(bytes([2]))
    (folder / "unlabeled_X.bin").write_bytes(b"".join(stl_bytes(image) for image in images[4:]))
    (folder / "class_names.txt").write_text(
        "airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n"
    )
    section = Data(source="stl10-binary", path=str(tmp_path))
    data = load_labelled(section)
    assert (data.images.numpy() == images[:3]).all()
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([0, 9, 4], [1])
    assert data.classes[9] == "truck"
    assert (
        load_auxiliary(Auxiliary(source="stl10-binary", path=str(tmp_path))).numpy() == images[4:]
    ).all()
    small = load_auxiliary(
        Auxiliary(source="stl10-binary", path=str(tmp_path), image_size=32)
    ).numpy()
    assert small.shape == (2, 3, 32, 32)
    by_hand = Image.fromarray(images[4].transpose(1, 2, 0)).resize(
        (32, 32), Image.Resampling.BILINEAR
    )
    assert (small[0] == np.asarray(by_hand).transpose(2, 0, 1)).all()
    (folder / "train_y.bin").write_bytes(bytes([1, 0, 5]))
    with pytest.raises(ValueError, match=r"train_X\.bin, row 1: the label is missing"):
        load_labelled(section)
    (folder / "train_y.bin").write_bytes(bytes([1, 2]))
    with pytest.raises(ValueError, match=r"train_y\.bin: 2 labels for 3 images"):
        load_labelled(section)


def test_svhn(tmp_path: Path) -> None:
    images = pixels(7)
    for name, rows, labels in (
        ("train", [0, 1, 2], [10, 1, 9]),
        ("test", [3], [2]),
        ("extra", [4, 5, 6], [3, 3, 10]),
    ):
        matlab = images[rows].transpose(2, 3, 1, 0)
        content = {"X": matlab, "y": np.array(labels, dtype=np.uint8)[:, None]}
        scipy.io.savemat(tmp_path / f"{name}_32x32.mat", content, do_compression=True)
    section = Data(source="svhn", path=str(tmp_path))
    data = load_labelled(section)
    assert (data.images.numpy() == images[:3]).all()
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([0, 1, 9], [2])
    assert count_labelled(section) == 3
    extra = Data(
        source="svhn", path=str(tmp_path / "extra_32x32.mat"), test=str(tmp_path / "test_32x32.mat")
    )
    assert (load_labelled(extra).labels.tolist(), load_labelled(extra).test_labels.tolist()) == (
        [3, 3, 0],
        [2],
    )
    public = load_auxiliary(Auxiliary(source="svhn", path=str(tmp_path / "extra_32x32.mat")))
    assert (public.numpy() == images[4:]).all()
    (tmp_path / "train_32x32.mat").write_bytes(b"rubbish" * 100)
    (problem,) = problems_of(tiny(data={"source": "svhn", "path": str(tmp_path)}))
    assert "train_32x32.mat: not a readable MATLAB file" in problem


@pytest.mark.parametrize(
    "source", ["cifar10-binary", "cifar100-binary", "stl10-binary", "svhn", "folder", "csv"]
)
def test_an_empty_folder_is_named(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty"):
        load_labelled(Data(source=source, path=str(tmp_path / "empty")))
    with pytest.raises(ValueError, match="empty"):
        load_auxiliary(Auxiliary(source=source, path=str(tmp_path / "empty")))


# ---------------------------------------------------------------- folders and tables


def test_folders_are_classes(tmp_path: Path) -> None:
    train = image_folder(tmp_path / "set" / "train", {"dog": 3, "cat": 2})
    image_folder(tmp_path / "set" / "test", {"eel": 1, "cat": 1}, seed=9)
    (tmp_path / "set" / "train" / "dog" / "notes.txt").write_text("no image")
    section = Data(source="folder", path=str(tmp_path / "set"))
    data = load_labelled(section)
    assert data.classes == ("cat", "dog", "eel")
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([0, 0, 1, 1, 1], [0, 2])
    assert (data.images.numpy() == np.concatenate([train["cat"], train["dog"]])).all()
    assert count_labelled(section) == 5
    assert len(load_auxiliary(Auxiliary(source="folder", path=str(tmp_path / "set")))) == 5
    one = Data(source="folder", path=str(tmp_path / "set" / "train"), test_fraction=0.4)
    assert (
        len(load_labelled(one).labels),
        len(load_labelled(one).test_labels),
        count_labelled(one),
    ) == (3, 2, 3)
    given = Data(
        source="folder", path=str(tmp_path / "set" / "train"), test=str(tmp_path / "set" / "test")
    )
    assert load_labelled(given).test_labels.tolist() == [0, 2]


def test_a_class_named_by_a_number_keeps_its_name(tmp_path: Path) -> None:
    made = image_folder(tmp_path / "set", {"10": 5, "2": 5, "3": 5})
    data = load_labelled(Data(source="folder", path=str(tmp_path / "set"), test_fraction=0.2))
    for image, label in zip(data.images.numpy(), data.labels.tolist(), strict=True):
        assert any((image == other).all() for other in made[data.classes[label]])


@pytest.mark.parametrize(
    ("values", "classes", "names", "numbers", "bad"),
    [
        ([2, 0, 1], None, "0 1 2", [2, 0, 1], {}),
        (["2", "0", 2.0, True], None, "0 1 2", [2, 0, 2, 1], {}),
        (["b", 7, "a"], None, "7 a b", [2, 0, 1], {}),
        (["3", 1, "10"], ("10", "2", "3"), "10 2 3", [2, 1, 0], {}),
        (
            ["cat", "1", "ox", 2],
            ("cat", "dog"),
            "cat dog",
            [0, 1, 0, 0],
            {2: "not one of", 3: "outside"},
        ),
        (
            [float("nan"), None, " ", 0, -1, 10**6],
            None,
            "0",
            [0] * 6,
            {0: "mis", 1: "mis", 2: "mis", 4: "out", 5: "out"},
        ),
    ],
)
def test_labels_are_numbered(
    values: list[object],
    classes: tuple[str, ...] | None,
    names: str,
    numbers: list[int],
    bad: dict[int, str],
) -> None:
    found, found_names, found_bad = number_labels(values, classes=classes)
    assert (found.tolist(), " ".join(found_names)) == (numbers, names)
    assert found_bad.keys() == bad.keys()
    assert all(word in found_bad[row] for row, word in bad.items())


def test_csv_with_paths_and_names(tmp_path: Path) -> None:
    images = pixels(4, side=6)
    (tmp_path / "images").mkdir()
    for number, image in enumerate(images):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(image))
    rows = [
        {"scan": f"images/{n}.png", "finding": name}
        for n, name in enumerate(["ill", "well", "well", "ill"])
    ]
    write_csv(tmp_path / "own.csv", rows)
    columns: dict[str, Any] = {"image_column": "scan", "label_column": "finding"}
    data = load_labelled(
        Data(source="csv", path=str(tmp_path / "own.csv"), test_fraction=0.25, **columns)
    )
    assert data.classes == ("ill", "well")
    assert len(data.labels) == 3
    with pytest.raises(
        ValueError, match=r"has no column image; it has scan, finding; set data\.image_column"
    ):
        load_labelled(Data(source="csv", path=str(tmp_path / "own.csv")))
    rows[2]["scan"] = "images/gone.png"
    write_csv(tmp_path / "own.csv", rows)
    with pytest.raises(ValueError, match=r"own\.csv, row 2: .*gone\.png"):
        load_labelled(Data(source="csv", path=str(tmp_path / "own.csv"), **columns))


def test_jsonl_and_csv_with_encoded_images(tmp_path: Path) -> None:
    images = pixels(5, side=6)
    texts = [base64.b64encode(png(image)).decode() for image in images]
    cells = [texts[0], f"data:image/png;base64,{texts[1]}", {"bytes": texts[2]}, texts[3], texts[4]]
    lines = [json.dumps({"image": cell, "label": label}) for label, cell in enumerate(cells)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines[:4]) + "\n", encoding="utf-8")
    (tmp_path / "test.jsonl").write_text(lines[4] + "\n", encoding="utf-8")
    data = load_labelled(Data(source="jsonl", path=str(tmp_path)))
    assert (data.images.numpy() == images[:4]).all()
    assert (data.labels.tolist(), data.test_labels.tolist(), len(data.classes)) == (
        [0, 1, 2, 3],
        [4],
        5,
    )
    write_csv(tmp_path / "own.csv", [{"image": text} for text in texts])
    assert (
        load_auxiliary(Auxiliary(source="csv", path=str(tmp_path / "own.csv"))).numpy() == images
    ).all()
    (tmp_path / "test.jsonl").write_text(lines[4] + "\n{oops\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"test\.jsonl, row 1: not valid JSON"):
        load_labelled(Data(source="jsonl", path=str(tmp_path)))


@pytest.mark.parametrize(
    ("label", "message"), [("", "the label is missing"), ("-1", "the label -1 is outside")]
)
def test_bad_labels_of_a_csv_are_named(tmp_path: Path, label: str, message: str) -> None:
    rows = [
        {"image": base64.b64encode(png(image)).decode(), "label": "1"}
        for image in pixels(4, side=6)
    ]
    rows[3]["label"] = label
    write_csv(tmp_path / "own.csv", rows)
    with pytest.raises(ValueError, match=rf"own\.csv, row 3: {message}"):
        load_labelled(Data(source="csv", path=str(tmp_path / "own.csv")))


# ---------------------------------------------------------------- decoding


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def test_sixteen_bits_become_eight() -> None:
    deep = np.array([[0, 257, 128], [65535, 1000, 514]], dtype=np.uint16)
    by_hand = [[[0, 1, round(128 / 257)], [255, round(1000 / 257), 2]]]
    assert decode(saved(Image.fromarray(deep))).tolist() == by_hand
    assert decode(saved(Image.fromarray(deep), "TIFF"), channels=3).tolist() == by_hand * 3
    with pytest.raises(ValueError, match="not 8- or 16-bit integers"):
        decode(saved(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF"))


def test_transparency_is_laid_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    assert decode(saved(image)).tolist() == [[[255, 10]], [[255, 20]], [[255, 30]]]
    grey = Image.new("LA", (1, 1), (0, 0))
    assert decode(saved(grey)).tolist() == [[[255]]]


def test_palettes_are_looked_up() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([9, 8, 7, 100, 110, 120])
    image.putpixel((1, 0), 1)
    assert decode(saved(image)).tolist() == [[[9, 100]], [[8, 110]], [[7, 120]]]
    assert decode(saved(image, transparency=0)).tolist() == [
        [[255, 100]],
        [[255, 110]],
        [[255, 120]],
    ]


def test_bits_and_colours_can_be_asked_for() -> None:
    assert decode(saved(Image.new("1", (1, 1), 1))).tolist() == [[[255]]]
    assert decode(saved(Image.new("L", (1, 1), 77)), channels=3).tolist() == [
        [[77]],
        [[77]],
        [[77]],
    ]
    assert decode(saved(Image.new("RGB", (1, 1), (50, 50, 50))), channels=1).tolist() == [[[50]]]
    assert decode(saved(Image.new("CMYK", (1, 1)), "TIFF")).shape == (3, 1, 1)


def test_photographs_are_turned_upright() -> None:
    image = Image.new("L", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # the camera was held upright
    assert decode(saved(image, "JPEG", exif=exif)).shape == (1, 4, 2)


def test_oblong_images_lose_their_ends() -> None:
    oblong = np.zeros((1, 4, 8), dtype=np.uint8)
    oblong[:, :, 2:6] = 200
    assert decode(oblong, side=2).tolist() == [[[200, 200], [200, 200]]]


def test_a_truncated_image_is_no_image() -> None:
    content = png(pixels(1)[0])
    with pytest.raises(ValueError, match="cannot be decoded as an image"):
        decode(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cannot be decoded as an image"):
        decode(b"")


def test_bad_images_of_all_clients_are_counted_and_five_are_named(tmp_path: Path) -> None:
    for client in ("one", "two", "three"):
        image_folder(tmp_path / client, {"a": 5, "b": 5})
    bad = [*(tmp_path / "one/b").iterdir(), *(tmp_path / "three/a").iterdir()]
    for file in bad:
        file.write_bytes(b"rubbish")
    clients = [str(tmp_path / client) for client in ("one", "two", "three")]
    with pytest.raises(ValueError, match=r"^10 rows are bad .*; the first 5 are:") as error:
        load_labelled(Data(source="folder", clients=tuple(clients)))
    named = str(error.value).splitlines()[1:]
    assert len(named) == 5
    assert all(
        f"  data.clients = {clients[0]}: {clients[0]}/b/{i}.png" in named[i] for i in range(5)
    )


def test_bad_images_stop_or_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = image_folder(tmp_path / "set", {"a": 4, "b": 4})
    (tmp_path / "set" / "a" / "0.png").write_bytes(b"rubbish")
    (tmp_path / "set" / "b" / "2.png").write_bytes(png(pixels(1, side=7)[0]))
    section = Data(source="folder", path=str(tmp_path / "set"), test_fraction=0.1)
    with pytest.raises(ValueError, match=r"^2 rows are bad .*data\.skip_bad = true") as error:
        load_labelled(section)
    first, second = str(error.value).splitlines()[1:]
    assert "a/0.png: cannot be decoded as an image" in first
    assert "b/2.png: 7x7 pixels, " in second
    assert "a/1.png has 6x6; set data" in second
    data = load_labelled(section.model_copy(update={"skip_bad": True}))
    good = np.concatenate([made["a"][1:], made["b"][[0, 1, 3]]])
    assert sorted(
        image.tobytes() for image in torch.cat([data.images, data.test_images]).numpy()
    ) == sorted(image.tobytes() for image in good)
    said = capsys.readouterr().err
    assert "skipped 2 of 8 rows" in said
    (tmp_path / "set" / "a" / "0.png").unlink()
    with pytest.raises(
        ValueError, match=r"2\.png: 7x7 pixels, .*a/1\.png has 6x6; set data\.image_size"
    ):
        load_labelled(section)
    assert load_labelled(section.model_copy(update={"image_size": 5})).images.shape[1:] == (3, 5, 5)


def test_threads_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image_folder(tmp_path / "set", {"a": 40, "b": 30})
    (tmp_path / "set" / "b" / "7.png").write_bytes(b"rubbish")
    section = Data(source="folder", path=str(tmp_path / "set"), skip_bad=True)
    alone = load_labelled(section)
    monkeypatch.setattr("fedaux.data.decoding.LARGE_BYTES", 0)
    monkeypatch.setattr("fedaux.data.decoding.BLOCK", 3)
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "second cache"))
    threaded = load_labelled(section)
    assert torch.equal(alone.images, threaded.images)
    assert torch.equal(alone.labels, threaded.labels)


def test_any_source_can_be_resized_and_coloured() -> None:
    data = load_labelled(Data(image_size=6, channels=3))
    assert (data.images.shape[1:], data.test_images.shape[1:]) == ((3, 6, 6), (3, 6, 6))
    assert load_auxiliary(Auxiliary(size=9, image_size=6)).shape == (9, 1, 6, 6)


def test_private_grey_images_go_with_public_coloured_ones(tmp_path: Path) -> None:
    image_folder(tmp_path / "public", {"any": 60})
    auxiliary = {
        "source": "folder",
        "path": str(tmp_path / "public"),
        "size": 50,
        "image_size": 8,
        "channels": 1,
    }
    assert fedaux.run(tiny(auxiliary=auxiliary, rounds=1), out=tmp_path / "run").summary["complete"]


# ---------------------------------------------------------------- the hub's library


def test_without_its_library_the_hub_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (problem,) = problems_of(tiny(data={"source": "huggingface", "path": "uoft-cs/cifar10"}))
    assert problem == (
        "source huggingface needs the package datasets: pip install -e '.[data]' in the checkout "
        "(docs/install.md: from a wheel)"
    )


def test_a_data_set_in_the_hubs_layout_is_read_by_its_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    images = pixels(5, side=6)
    labels = datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(
        {"img": datasets.Image(), "label": labels, "wnid": datasets.Value("string")}
    )
    for place in ("set", "whole"):
        (tmp_path / place / "data").mkdir(parents=True)
    parts = (
        ("set", "train", [0, 1, 2]),
        ("set", "test", [3, 4]),
        ("set", "unlabeled", [1]),
        ("whole", "full", range(5)),
    )
    for place, name, rows in parts:
        columns = {
            "img": [{"bytes": png(images[row]), "path": None} for row in rows],
            "label": [r % 2 for r in rows],
        }
        columns["wnid"] = [
            "n02099601" if row == 3 else "n03179701" for row in rows
        ]  # a dog, and desks
        split = datasets.Dataset.from_dict(columns, features=features)
        split.to_parquet(str(tmp_path / place / "data" / f"{name}-00000-of-00001.parquet"))
    environment = {
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "FEDAUX_CACHE": str(tmp_path / "cache"),
    }
    places = [str(tmp_path / place) for place in ("set", "whole")]
    done = run_program("hub_images.py", *places, changes=environment)
    lines = done.stdout.splitlines()
    assert lines[0] == f"('cat', 'dog') [0, 1, 0] [1, 0] 3 {images[:3].sum()}", done.stderr
    assert lines[1:3] == ["[0, 1, 0]", "(2, 3, 3, 3)"]
    assert lines[3:5] == [str(images[1].sum()), "4 1"]
    assert lines[5].startswith("auxiliary.split = 'unlabelled': ")
    assert lines[5].endswith("it has train, test, unlabeled; did you mean unlabeled?")
    assert lines[6].endswith("has no split train; it has full; auxiliary.split names another")
    assert lines[7] == str(images[3].sum())
    assert "the hub could not be asked, or has no such data set" in lines[8]


def test_every_source_of_files_reads_labelled_and_public_images() -> None:
    others = ("tensors", "lines", "features")  # lines has texts without labels
    files = [name for name, one in SOURCES.items() if one.needs_path and name not in others]
    assert len(files) == 10
    assert all(SOURCES[name].load_labelled and SOURCES[name].load_auxiliary for name in files)


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        ((torch.zeros(2), torch.zeros(2)), "returns a tuple; should be a fedaux.data.LabelledData"),
        ({"images": torch.rand(4, 1, 8, 8)}, r"returns images, torch.float32 \[4, 1, 8, 8\]"),
        ({"labels": torch.zeros(4)}, r"returns labels, torch.float32 \[4\]; should be int64 \[4\]"),
        ({"labels": torch.tensor([0, 1, 2, 1])}, "returns labels, 0 to 2; should be 0 to 1, posit"),
        (
            {"test_labels": torch.zeros(3).long()},
            r"returns test_labels, torch.int64 \[3\]; should be",
        ),
    ],
)
def test_what_a_source_of_a_plugin_returns_is_checked(
    loaded: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(loaded, dict):
        images, labels = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
        loaded = replace(LabelledData(images, labels, images, labels, ("a", "b")), **loaded)
    source = Source(count_labelled=lambda section: 4, load_labelled=lambda section: loaded)
    monkeypatch.setitem(SOURCES, "own", source)
    with pytest.raises(ValueError, match=f"^data.source = 'own': load_labelled {said}"):
        load_labelled(Data(source="own"))


def test_what_a_public_source_of_a_plugin_returns_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(SOURCES, "own", Source(load_auxiliary=lambda section: torch.rand(4, 8, 8)))
    with pytest.raises(ValueError, match=r"load_auxiliary returns torch.float32 \[4, 8, 8\]; imag"):
        load_auxiliary(Auxiliary(source="own"))
