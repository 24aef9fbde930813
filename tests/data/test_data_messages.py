"""Messages about faulty data files name the setting that led to them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from helpers.image_files import image_folder, pixels, png, write_csv

from fedaux.config import Auxiliary, Data
from fedaux.data import count_labelled, load_auxiliary, load_labelled, load_test


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are those that a user would type."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDAUX_CACHE", "")


def labelled_rows(*labels: str) -> list[dict[str, str]]:
    images = pixels(len(labels), side=6)
    return [
        {"image": base64.b64encode(png(image)).decode(), "label": label}
        for image, label in zip(images, labels, strict=True)
    ]


def told(error: pytest.ExceptionInfo[ValueError]) -> str:
    return str(error.value)


def test_more_than_there_is_may_not_be_asked_for() -> None:
    image_folder(Path("images"), {"a": 5, "b": 2})
    with pytest.raises(ValueError, match="should be") as error:
        load_auxiliary(Auxiliary(source="folder", path="images", size=50))
    assert told(error) == "auxiliary.size = 50: should be at most 7, the number of examples"
    with pytest.raises(ValueError, match="should be") as error:
        load_labelled(Data(source="folder", path="images", test="images", test_size=9))
    assert told(error) == "data.test_size = 9: should be at most 7, the number of test examples"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("folder", "has no folders; should have"),
        ("csv", "no .csv files found; should be"),
        ("svhn", "has no train_"),
    ],
)
def test_empty_folders_are_told_with_their_setting(source: str, what: str) -> None:
    Path("empty").mkdir()
    Path("bare/cat").mkdir(parents=True)
    image_folder(Path("images"), {"a": 5, "b": 2})
    public = "has no images (.bmp" if source == "folder" else what
    with pytest.raises(ValueError, match="empty") as error:
        load_auxiliary(Auxiliary(source=source, path="./empty"))
    assert told(error).startswith(f"auxiliary.path = empty: {public}")
    places: list[tuple[str, dict[str, Any]]] = [
        ("data.path", {"path": "empty"}),
        ("data.clients", {"clients": "empty"}),
    ]
    if source == "folder":
        places.append(("data.test", {"path": "images", "test": "empty"}))
    for setting, places_given in places:
        for read in (load_labelled, count_labelled):
            with pytest.raises(ValueError, match="empty") as error:
                read(Data(source=source, **places_given))
            assert told(error).startswith(f"{setting} = empty: {what}")
    with pytest.raises(ValueError, match="empty") as error:
        load_test(Data(source=source, test="empty"))
    assert told(error).startswith(f"data.test = empty: {what}")
    if source == "folder":
        with pytest.raises(ValueError, match="bare") as error:
            load_labelled(Data(source="folder", path="bare"))
        assert told(error).startswith("data.path = bare: has no images (")
        Path("notes.txt").touch()
        with pytest.raises(ValueError, match="should be a folder") as error:
            load_labelled(Data(source="folder", path="images", test="notes.txt"))
        assert told(error).startswith("data.test = notes.txt: should be a folder")


def test_bad_rows_are_told_with_their_setting() -> None:
    good, bad = labelled_rows("0", "1", "0", "1"), labelled_rows("0", "1", "-3")
    write_csv(Path("good.csv"), good)
    write_csv(Path("bad.csv"), bad)
    line = (
        "bad.csv, row 2: the label -3 is outside the range 0 .. 99999 (data.skip_bad = true skips "
        "such rows)"
    )
    places: list[tuple[str, dict[str, Any]]] = [
        ("data.path", {"path": "bad.csv"}),
        ("data.test", {"path": "good.csv", "test": "bad.csv"}),
        ("data.clients", {"clients": ["good.csv", "bad.csv"]}),
    ]
    for setting, given in places:
        with pytest.raises(ValueError, match="label") as error:
            load_labelled(Data(source="csv", **given))
        assert told(error) == f"{setting} = {line}"
    Path("both").mkdir()
    write_csv(Path("both/train.csv"), good)
    write_csv(Path("both/test.csv"), bad)
    with pytest.raises(ValueError, match="label") as error:
        load_labelled(Data(source="csv", path="both"))
    assert told(error) == f"data.path = both: both/{line.replace('bad', 'test', 1)}"
    bad[1]["image"] = "rubbish"
    write_csv(Path("bad.csv"), bad)
    with pytest.raises(ValueError, match="decoded") as error:
        load_auxiliary(Auxiliary(source="csv", path="bad.csv"))
    assert told(error).startswith("auxiliary.path = bad.csv, row 1: cannot be decoded as an image")


@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_an_empty_table_is_called_empty(source: str) -> None:
    file = Path(f"none.{source}")
    file.touch()
    for content, found in (("", "is empty"), ("image,label\n", "has a header and no rows")):
        if source == "csv" or not content:
            file.write_text(content)
            with pytest.raises(ValueError, match="row") as error:
                load_auxiliary(Auxiliary(source=source, path=str(file)))
            assert (
                told(error)
                == f"auxiliary.path = {file}: {found}; should have a row for each example"
            )
            with pytest.raises(ValueError, match="row") as error:
                count_labelled(Data(source=source, path=str(file)))
            assert told(error) == f"data.path = {file}: {found}; should have a row for each example"


def test_a_file_whose_name_is_that_of_a_setting_is_still_found() -> None:
    write_csv(Path("data.csv"), [{"picture": "x", "label": "0"}])
    with pytest.raises(ValueError, match="column") as error:
        load_labelled(Data(source="csv", path="data.csv"))
    line = "has no column image; it has picture, label; set data.image_column"
    assert told(error) == f"data.path = data.csv: {line}"
