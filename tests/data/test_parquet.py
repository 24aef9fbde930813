from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.experiments import tiny
from helpers.paths import shared
from PIL import Image

from fedaux.config import Auxiliary, Data
from fedaux.data import load_auxiliary, load_labelled, load_test
from fedaux.running.preflight import problems_of

pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
SHARED = Path(os.environ.get("FEDAUX_TEST_DATA") or shared("data")) / "cifar10"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDAUX_CACHE", str(tmp_path / "cache"))


def encoded(pixels: np.ndarray, *, mode: str = "RGB") -> dict[str, object]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, format="PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def pictures(size: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size, 6, 5, 3), dtype=np.uint8)


def write(path: Path, images: list[object], labels: list[int] | None = None) -> None:
    import pyarrow.parquet

    columns: dict[str, object] = {"image": images} | (
        {"label": labels} if labels is not None else {}
    )
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "train-00000-of-00002.parquet",
        [encoded(p) for p in pictures(7)],
        [0, 1, 2, 0, 1, 2, 0],
    )
    write(
        tmp_path / "train-00001-of-00002.parquet",
        [encoded(p) for p in pictures(5, seed=1)],
        [1] * 5,
    )
    write(
        tmp_path / "test-00000-of-00001.parquet",
        [encoded(p) for p in pictures(3, seed=2)],
        [0, 1, 2],
    )
    return tmp_path


def test_a_folder_in_the_hubs_layout_is_read_in_order(tmp_path: Path) -> None:
    data = load_labelled(Data(source="parquet", path=str(folder(tmp_path))))
    expected = np.concatenate([pictures(7), pictures(5, seed=1)]).transpose(0, 3, 1, 2)
    assert (data.images.numpy() == expected).all()
    assert data.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 1, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 1, 2]
    assert len(data.classes) == 3
    problems = problems_of(
        tiny(data={"source": "parquet", "path": str(tmp_path)}, split={"num_clients": 13})
    )
    assert problems == ["split.num_clients = 13: more clients than the 12 training examples"]


def test_auxiliary_images_need_no_labels_and_can_be_cut(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", [encoded(p) for p in pictures(6)])
    assert load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path), size=4)).shape == (
        4,
        3,
        6,
        5,
    )
    with pytest.raises(ValueError, match="has no column label"):
        load_labelled(Data(source="parquet", path=str(tmp_path)))


def test_any_split_can_be_chosen_by_its_name(tmp_path: Path) -> None:
    folder(tmp_path)
    for shard in range(2):
        path = tmp_path / f"unlabeled-{shard:05d}-of-00002.parquet"
        write(path, [encoded(p) for p in pictures(4, seed=5 + shard)], [3] * 4)
    section = Auxiliary(source="parquet", path=str(tmp_path), split="unlabeled")
    expected = np.concatenate([pictures(4, seed=5), pictures(4, seed=6)]).transpose(0, 3, 1, 2)
    assert (load_auxiliary(section).numpy() == expected).all()
    assert len(load_auxiliary(section.model_copy(update={"split": None}))) == 12
    data = load_labelled(Data(source="parquet", path=str(tmp_path), split="unlabeled"))
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([3] * 8, [0, 1, 2])
    with pytest.raises(
        ValueError,
        match=r"auxiliary\.split = 'unlabelled': .* it has test, train, unlabeled; did you mean "
        r"unlabeled\?",
    ):
        load_auxiliary(section.model_copy(update={"split": "unlabelled"}))
    one = Auxiliary(
        source="parquet", path=str(tmp_path / "test-00000-of-00001.parquet"), split="train"
    )
    with pytest.raises(ValueError, match=r"auxiliary\.split = 'train': .* it has test"):
        load_auxiliary(one)


def test_what_is_trained_on_is_not_tested_on(tmp_path: Path) -> None:
    folder(tmp_path)
    data = load_labelled(
        Data(source="parquet", path=str(tmp_path), split="test", test_fraction=0.4)
    )
    assert sorted([*data.labels.tolist(), *data.test_labels.tolist()]) == [0, 1, 2]
    assert len(data.labels) == 2


def test_a_split_is_that_of_the_training_data_alone(tmp_path: Path) -> None:
    folder(tmp_path)
    (tmp_path / "held").mkdir()
    write(tmp_path / "held" / "test-0.parquet", [encoded(p) for p in pictures(4)], [2, 2, 1, 0])
    section = Data(source="parquet", path=str(tmp_path), split="test", test=str(tmp_path / "held"))
    data = load_labelled(section)
    assert (data.labels.tolist(), data.test_labels.tolist()) == ([0, 1, 2], [2, 2, 1, 0])
    section = section.model_copy(
        update={"path": None, "test": str(tmp_path / "held" / "test-0.parquet")}
    )
    assert load_test(section).test_labels.tolist() == [
        2,
        2,
        1,
        0,
    ]  # as a server without training data has it


def test_a_folder_may_be_a_split(tmp_path: Path) -> None:
    for name, value in (("train", 1), ("extra", 2)):
        (tmp_path / "set" / name / "some").mkdir(parents=True)
        Image.fromarray(np.full((4, 4), value, dtype=np.uint8)).save(
            tmp_path / "set" / name / "some" / "0.png"
        )
    public = load_auxiliary(Auxiliary(source="folder", path=str(tmp_path / "set"), split="extra"))
    assert public.unique().tolist() == [2]
    with pytest.raises(ValueError, match=r"auxiliary\.split = 'full': .* it has extra, train"):
        load_auxiliary(Auxiliary(source="folder", path=str(tmp_path / "set"), split="full"))


def test_a_source_without_splits_says_so() -> None:
    assert problems_of(tiny(auxiliary={"split": "unlabeled"})) == [
        "auxiliary.split = 'unlabeled': not supported by letters; only by features, folder, "
        "parquet, csv, jsonl, lines, huggingface"
    ]


def test_grey_images_stay_grey_and_others_become_rgb(tmp_path: Path) -> None:
    write(tmp_path / "train-0.parquet", [encoded(p, mode="L") for p in pictures(3)])
    assert load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path))).shape == (3, 1, 6, 5)
    write(tmp_path / "train-0.parquet", [encoded(p, mode="RGBA") for p in pictures(3)])
    assert load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path))).shape == (3, 3, 6, 5)


def test_a_row_that_is_no_image_is_named(tmp_path: Path) -> None:
    images: list[object] = [encoded(p) for p in pictures(4)]
    write(tmp_path / "train-0.parquet", [*images, {"bytes": b"rubbish", "path": None}])
    with pytest.raises(ValueError, match=r"train-0\.parquet, row 4: cannot be decoded"):
        load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path)))
    write(tmp_path / "train-0.parquet", [*images, encoded(pictures(1)[0][:, :3])])
    with pytest.raises(ValueError, match=r"row 4: 3x6 pixels, .*row 0 has 5x6"):
        load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path)))


def test_a_folder_without_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \.parquet files found"):
        load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path)))


def described(path: Path, names: list[str], *, labels: list[object]) -> None:
    """Write a file as the hub's libraries do: they describe the columns in the schema's
    metadata."""
    import pyarrow.parquet

    features = {"img": {"_type": "Image"}, "fine_label": {"_type": "ClassLabel", "names": names}}
    table = pyarrow.table(
        {"img": [encoded(p) for p in pictures(len(labels))], "fine_label": labels}
    )
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def test_class_names_and_columns_come_from_the_hubs_description(tmp_path: Path) -> None:
    (tmp_path / "set" / "data").mkdir(parents=True)
    described(
        tmp_path / "set" / "data" / "train-0.parquet", ["cat", "dog", "eel"], labels=[0, 1, 0, 1]
    )
    described(
        tmp_path / "set" / "data" / "validation-0.parquet", ["cat", "dog", "eel"], labels=[1, 1]
    )
    data = load_labelled(Data(source="parquet", path=str(tmp_path / "set")))
    assert (data.classes, data.labels.tolist(), data.test_labels.tolist()) == (
        ("cat", "dog", "eel"),
        [0, 1, 0, 1],
        [1, 1],
    )


@pytest.mark.parametrize(
    ("label", "message"),
    [(3, "row 1: the label 3 is outside the range 0 .. 2"), (None, "row 1: the label is missing")],
)
def test_a_bad_label_stops_or_is_skipped_and_counted(
    tmp_path: Path, label: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    described(
        tmp_path / "own.parquet", ["cat", "dog", "eel"], labels=[0, label, 2, 1, 2, 1, 0, 0, 1, 2]
    )
    with pytest.raises(ValueError, match=message):
        load_labelled(Data(source="parquet", path=str(tmp_path / "own.parquet")))
    for _ in range(2):  # decoded, then from the cache
        section = Data(source="parquet", path=str(tmp_path / "own.parquet"), skip_bad=True)
        data = load_labelled(section)
        assert sorted([*data.labels.tolist(), *data.test_labels.tolist()]) == [
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            2,
            2,
        ]
        said = capsys.readouterr().err
        assert "skipped 1 of 10 rows" in said
        assert message in said
        assert said.count("\n") == 1


def test_a_column_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    described(tmp_path / "own.parquet", ["cat"], labels=[0, 0])
    section = Data(source="parquet", path=str(tmp_path / "own.parquet"), label_column="species")
    with pytest.raises(
        ValueError, match=r"data\.label_column = 'species': .* it has img, fine_label"
    ):
        load_labelled(section)


def test_a_file_that_is_no_parquet_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.parquet").write_bytes(b"rubbish")
    (problem,) = problems_of(
        tiny(data={"source": "parquet", "path": str(tmp_path / "own.parquet")})
    )
    assert "own.parquet: not a readable Parquet file" in problem


def test_damage_inside_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    folder(tmp_path)
    second = tmp_path / "train-00001-of-00002.parquet"
    content = bytearray(second.read_bytes())
    content[20 : len(content) // 2] = bytes(
        len(content) // 2 - 20
    )  # the footer, at the end, stays whole
    second.write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet: damaged after row 0"):
        load_auxiliary(Auxiliary(source="parquet", path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"train-00001-of-00002\.parquet: damaged after row 0"):
        load_labelled(Data(source="parquet", path=str(tmp_path)))


def test_shards_with_other_columns_are_named(tmp_path: Path) -> None:
    import pyarrow.parquet

    folder(tmp_path)
    table = pyarrow.table({"picture": [encoded(p) for p in pictures(2)], "label": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "train-00001-of-00002.parquet")
    with pytest.raises(
        ValueError,
        match=r"train-00001-of-00002\.parquet: has no column image; it has picture, label; should "
        r"have the columns of "
        r"train-00000-of-00002\.parquet",
    ):
        load_labelled(Data(source="parquet", path=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs cifar10 in $FEDAUX_TEST_DATA or in shared/data"
)
def test_cifar10_is_what_it_should_be() -> None:
    data = load_labelled(
        Data(source="parquet", path=str(SHARED / "test-00000-of-00001.parquet"), test_fraction=0.5)
    )
    labels = np.concatenate([data.labels.numpy(), data.test_labels.numpy()])
    assert data.images.shape[1:] == (3, 32, 32)
    assert np.bincount(labels).tolist() == [1000] * 10
