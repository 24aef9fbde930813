"""Subsets by WordNet id: against WordNet's own files where they are, and by hand where they are
not."""

from __future__ import annotations

import importlib
import json
import os
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path

import numpy as np
import pytest
from helpers.paths import ROOT, shared

from fedaux.config import Auxiliary
from fedaux.data.folders import open_folder
from fedaux.data.parquet import open_parquet
from fedaux.data.tables import Table
from fedaux.data.wordnet import ROOTS, id_of_folder, nouns, rows_in_table, rows_of, subset

TINY = shared("data/tinyimagenet32")
WORDNET = Path(os.environ.get("WNSEARCHDIR", "/usr/share/wordnet")) / "data.noun"
needs_wordnet = pytest.mark.skipif(
    not WORDNET.is_file(),
    reason="needs WordNet 3.0's data.noun: apt-get install wordnet-base, or set WNSEARCHDIR",
)

GOLDEN_RETRIEVER, GOLDFISH, SULPHUR_BUTTERFLY, ALBATROSS = (
    "n02099601",
    "n01443537",
    "n02281406",
    "n02058221",
)
DESK, DESKTOP_COMPUTER, BARN, SCHOOL_BUS = "n03179701", "n03180011", "n02793495", "n04146614"
WOLF = "n02114367"  # a canine beside the dogs, not below them


def test_the_roots_are_those_of_the_paper() -> None:
    sizes = {
        "devices": 2765,
        "birds": 872,
        "animals": 4017,
        "dogs": 190,
        "invertebrates": 767,
        "structures": 1529,
    }
    assert {name: len(subset(name)) for name in ROOTS} == sizes
    for name, wnid in ROOTS.items():
        assert subset(wnid) == subset(name)
        assert wnid in subset(name)


def test_subsets_lie_in_each_other_as_they_should() -> None:
    for name in ("dogs", "birds", "invertebrates"):
        assert subset(name) < subset("animals")
    assert not subset("dogs") & subset("birds")
    assert not subset("birds") & subset("invertebrates")
    assert not subset("animals") & (subset("structures") | subset("devices"))


@pytest.mark.parametrize(
    ("wnid", "names"),
    [
        (GOLDEN_RETRIEVER, {"dogs", "animals"}),
        (WOLF, {"animals"}),
        (GOLDFISH, {"animals"}),
        (SULPHUR_BUTTERFLY, {"animals", "invertebrates"}),
        (ALBATROSS, {"animals", "birds"}),
        (DESKTOP_COMPUTER, {"devices"}),
        (BARN, {"structures"}),
        (DESK, set()),  # a table, which is furniture
        (SCHOOL_BUS, set()),
    ],
)
def test_single_ids_are_where_wordnet_has_them(wnid: str, names: set[str]) -> None:
    assert {name for name in ROOTS if wnid in subset(name)} == names


@pytest.fixture(scope="module")
def parents() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for child, parent in zip(nouns().children.tolist(), nouns().parents.tolist(), strict=True):
        found.setdefault(child, []).append(parent)
    return found


@pytest.mark.parametrize("root", [*ROOTS.values(), "n00001740", GOLDEN_RETRIEVER])
def test_a_subset_is_what_reaches_the_root_going_up(
    root: str, parents: dict[int, list[int]]
) -> None:
    graph = nouns()
    top = graph.offsets.tolist().index(int(root[1:]))

    @cache
    def reaches(noun: int) -> bool:
        return noun == top or any(reaches(parent) for parent in parents.get(noun, []))

    assert subset(root) == {
        f"n{graph.offsets[noun]:08d}" for noun in range(len(graph.offsets)) if reaches(noun)
    }


def test_there_is_one_noun_above_all() -> None:
    assert len(subset("n00001740")) == len(nouns().offsets) == 82115
    assert subset(GOLDEN_RETRIEVER) == {GOLDEN_RETRIEVER}


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"^auxiliary\.subset = dog: no such subset; did you mean dogs\?$"
    ):
        subset("dog", key="auxiliary.subset")
    with pytest.raises(
        ValueError, match=r"subset = n02084072: no such subset; did you mean n02084071\?"
    ):
        subset("n02084072")
    with pytest.raises(
        ValueError,
        match=r"subset = x: no such subset; should be devices, birds, animals, dogs, inv",
    ):
        subset("x")


def test_rows_are_those_of_the_subset_in_order() -> None:
    wnids = [GOLDEN_RETRIEVER, DESK, GOLDFISH, GOLDEN_RETRIEVER, ALBATROSS]
    assert rows_of(wnids, subset("animals")).tolist() == [0, 2, 3, 4]
    assert rows_of(wnids, subset("dogs") | subset("birds")).tolist() == [0, 3, 4]
    nothing = rows_of(wnids, subset("devices"))
    assert nothing.shape == (0,)
    assert nothing.dtype == np.int64


@pytest.mark.parametrize(
    "strange", ["golden retriever", "n00000000", "n99999999", "n2099601", "v02099601", None]
)
def test_an_id_that_is_no_noun_is_told(strange: str) -> None:
    with pytest.raises(ValueError, match=f"column: row 2 has {strange!r}; should be a WordNet id"):
        rows_of([GOLDEN_RETRIEVER, DESK, strange, strange], subset("dogs"), key="column")


def test_folders_named_by_ids(tmp_path: Path) -> None:
    paths = ["n02099601/1.JPEG", "n02099601/images/n03179701_2.JPEG", "n03179701/1.JPEG"]
    paths += ["n03179701/n02085620-Chihuahua/n02085620_7.jpg"]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    table = open_folder(str(tmp_path), "train", Auxiliary(), False)
    assert table is not None
    assert rows_in_table(table, "dogs", key="auxiliary.subset").tolist() == [0, 1, 3]
    with pytest.raises(
        ValueError, match="birds: none of the 4 images, of 3 classes, belongs to it"
    ):
        rows_in_table(table, "birds", key="auxiliary.subset")
    with pytest.raises(ValueError, match=r"cats/n02099601_1\.JPEG is in no folder named by"):
        id_of_folder(Path("cats/n02099601_1.JPEG"))


def write(path: Path, columns: dict[str, list[object]], *, names: list[str] | None = None) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = len(next(iter(columns.values())))
    table = pyarrow.table({"image": [b""] * rows, **columns})
    if names is not None:
        described = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
    parquet.write_table(table, path)
    return path


def opened(path: Path) -> Table:
    table = open_parquet(str(path), "train", Auxiliary(), False)
    assert table is not None
    return table


def test_rows_of_parquet_files_count_through_all_of_them(tmp_path: Path) -> None:
    second = tmp_path / "train-1.parquet"
    write(
        tmp_path / "train-0.parquet",
        {"wnid": [DESK, GOLDEN_RETRIEVER, GOLDFISH], "label": [0, 0, 0]},
    )
    write(second, {"wnid": [GOLDEN_RETRIEVER, DESK]})
    for dogs in ("dogs", ROOTS["dogs"]):
        assert rows_in_table(opened(tmp_path), dogs, key="auxiliary.subset").tolist() == [1, 3]
    with pytest.raises(
        ValueError,
        match=r"^auxiliary\.subset = birds: none of the 5 images, of 3 classes, belongs to it",
    ):
        rows_in_table(opened(tmp_path), "birds", key="auxiliary.subset")
    write(second, {"wnid": [GOLDEN_RETRIEVER, "dog"]})
    with pytest.raises(ValueError, match=r"^auxiliary\.subset = dogs: row 4 has 'dog'"):
        rows_in_table(opened(tmp_path), "dogs", key="auxiliary.subset")


def test_classes_named_by_ids_do_as_well(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    write(file, {"label": [1, 0, 1]}, names=[DESK, GOLDEN_RETRIEVER])
    assert rows_in_table(opened(file), "dogs", key="auxiliary.subset").tolist() == [0, 2]
    write(file, {"label": [1, -1]}, names=[DESK, GOLDEN_RETRIEVER])
    with pytest.raises(ValueError, match="row 1 has 'label -1'; should be a WordNet id"):
        rows_in_table(opened(file), "dogs", key="auxiliary.subset")
    for names in (["desk", "golden retriever"], None):
        write(file, {"label": [1, 0, 1]}, names=names)
        with pytest.raises(ValueError, match=r"dogs: .* has no column wnid and no classes named"):
            rows_in_table(opened(file), "dogs", key="auxiliary.subset")


def test_the_licence_of_wordnet_ships_beside_the_table() -> None:
    notice = package_files("fedaux.data").joinpath("WORDNET-LICENSE").read_text(encoding="ascii")
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in notice
    assert "Permission to use, copy, modify and distribute this software" in notice
    assert notice.endswith("Princeton University and LICENSEE agrees to preserve same.\n")


@needs_wordnet
def test_the_table_is_what_the_script_derives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    script = importlib.import_module("make_wordnet_table")
    shipped = script.TABLES
    monkeypatch.setattr(script, "TABLES", tmp_path)
    script.main(WORDNET.parent)
    with (
        np.load(shipped / "wordnet-nouns.npz") as held,
        np.load(tmp_path / "wordnet-nouns.npz") as derived,
    ):
        assert held.files == derived.files
        for name in held.files:
            assert held[name].dtype == derived[name].dtype
            assert np.array_equal(held[name], derived[name])
    assert (shipped / "WORDNET-LICENSE").read_bytes() == (tmp_path / "WORDNET-LICENSE").read_bytes()
    (tmp_path / "data.noun").write_bytes(
        WORDNET.read_bytes().replace(b"WordNet 3.0 Copyright 2006", b"WordNet 3.1 ", 1)
    )
    with pytest.raises(ValueError, match=r"is not of WordNet 3\.0"):
        script.main(tmp_path)


@needs_wordnet
@pytest.mark.parametrize("name", ROOTS)
def test_a_subset_is_what_wordnets_downward_pointers_reach(name: str) -> None:
    # The table was made from the pointers upwards (@, @i); these are the others, read where they
    # stand in the file.
    content = WORDNET.read_bytes()
    waiting, found = [ROOTS[name]], set()
    while waiting:
        wnid = waiting.pop()
        if wnid not in found:
            found.add(wnid)
            start = int(wnid[1:])
            line = content[start : content.index(b"\n", start)].decode("ascii")
            assert line.startswith(wnid[1:])
            fields = line.partition(" | ")[0].split()
            waiting += [f"n{fields[i + 1]}" for i in range(len(fields)) if fields[i] in {"~", "~i"}]
    assert subset(name) == found


@pytest.mark.skipif(
    not TINY.is_dir(), reason="needs shared/data/tinyimagenet32 in the checkout or beside it"
)
def test_counts_in_tiny_imagenet_are_those_of_the_documents() -> None:
    pytest.importorskip("pyarrow", reason="needs the extra parquet")
    table = opened(TINY)
    counts = {name: len(rows_in_table(table, name, key="auxiliary.subset")) for name in ROOTS}
    print(counts)
    assert counts == {
        "devices": 13500,
        "birds": 2000,
        "animals": 29500,
        "dogs": 3000,
        "invertebrates": 11500,
        "structures": 9500,
    }
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for name, wnid in ROOTS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` | {wnid} |"))
        assert f"| {counts[name]:,} |" in row
        assert f"| {len(subset(name)):,} |" in row
