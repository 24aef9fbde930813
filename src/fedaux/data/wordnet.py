"""Subsets of ImageNet by WordNet id, as the paper forms its auxiliary data (appendix, generating Imagenet subsets).

ImageNet names a class by the letter n and the offset of a noun in WordNet 3.0. A subset is a root and everything below
it, following hyponyms and instances. The table that ships holds the parents of all nouns, so any root can be asked.
It is derived from WordNet 3.0, Copyright 2006 by Princeton University: see `tables/WORDNET-LICENSE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedaux.config_errors import nearest

if TYPE_CHECKING:
    from fedaux.data.tables import Table

ROOTS = {
    "devices": "n03183080",
    "birds": "n01503061",
    "animals": "n00015388",
    "dogs": "n02084071",
    "invertebrates": "n01905661",
    "structures": "n04341686",
}
WNID = re.compile(r"n(\d{8})")


@dataclass(frozen=True)
class Nouns:
    """The nouns of WordNet 3.0: offsets [N] ascending; link e leads from `children[e]` up to `parents[e]`, both [E]."""

    offsets: NDArray[np.int64]
    children: NDArray[np.int64]
    parents: NDArray[np.int64]

    def position(self, wnid: str) -> int | None:
        """Return where a noun stands in `offsets`, or None where WordNet 3.0 has no such noun."""
        if not (match := WNID.fullmatch(wnid)):
            return None
        place = int(np.searchsorted(self.offsets, offset := int(match[1])))
        return place if place < len(self.offsets) and self.offsets[place] == offset else None


@cache
def nouns() -> Nouns:
    """Read the table that ships; a noun's offset is stored as the gap to the one before, its parents as positions."""
    with (
        package_files("fedaux.data").joinpath("wordnet-nouns.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as table,
    ):
        offsets = np.cumsum(table["gaps"], dtype=np.int64)
        children = np.repeat(np.arange(len(offsets)), table["num_parents"])
        return Nouns(offsets=offsets, children=children, parents=table["parents"].astype(np.int64))


def subset(name: str, *, key: str = "subset") -> frozenset[str]:
    """Return the ids of a root, a name of `ROOTS` or any noun's id, and of everything below it.

    Raises ValueError, naming the setting `key`, where there is no such name or noun.
    """
    graph = nouns()
    root = graph.position(ROOTS.get(name, name))
    if root is None:
        there_are = f"; there are {', '.join(ROOTS)}, and the id of any noun of WordNet 3.0, such as {ROOTS['dogs']}"
        raise ValueError(
            f"{key} = {name}: no such subset{nearest(name, [*ROOTS, *ROOTS.values()]) or there_are}"
        )
    reached = np.zeros(len(graph.offsets), dtype=np.bool_)
    fresh = np.array([root])
    while len(fresh):  # a level a turn; a noun may have several parents, and counts once
        reached[fresh] = True
        below = graph.children[reached[graph.parents]]
        fresh = below[~reached[below]]
    return frozenset(f"n{offset:08d}" for offset in graph.offsets[reached])


def rows_of(
    wnids: Sequence[str], members: Collection[str], *, key: str = "wnids"
) -> NDArray[np.int64]:
    """Return the rows, ascending, whose id [N] is among the members.

    Raises ValueError naming the first row whose id is no noun of WordNet 3.0, such as a class's name: it would
    otherwise be left out without a word.
    """
    graph = nouns()
    strange = {
        wnid for wnid in set(wnids) if not isinstance(wnid, str) or graph.position(wnid) is None
    }
    if strange:
        row = next(row for row, wnid in enumerate(wnids) if wnid in strange)
        raise ValueError(
            f"{key}: row {row} has {wnids[row]!r}; should be the id of a noun of WordNet 3.0, as n02099601"
        )
    members = frozenset(members)
    return np.array([row for row, wnid in enumerate(wnids) if wnid in members], dtype=np.int64)


def rows_in_parquet(files: Sequence[Path], name: str, *, key: str) -> NDArray[np.int64]:
    """Return the rows of a subset, ascending, counted through all the files in the order given; images stay unread.

    The id of a row is in its column `wnid`, or is the name of its class where the column `label` has names that are
    ids. Raises ValueError, naming the setting `key`, for an unknown subset, for files without ids, and for no rows.
    """
    members = subset(name, key=key)
    wnids = [wnid for file in files for wnid in _wnids_in_parquet(file, key=f"{key} = {name}")]
    return _some_rows(wnids, members, key=f"{key} = {name}")


def rows_in_table(table: Table, name: str, *, key: str) -> NDArray[np.int64]:
    """Return the rows of a subset, ascending, by the table's column `wnid`; unreadable rows are not among them.

    Raises ValueError, naming the setting `key`, for an unknown subset, for a table without ids, and for no rows.
    """
    members = subset(name, key=key)
    if table.wnids is None:
        raise ValueError(
            f"{key} = {name}: {table.files[0]} has no column wnid with WordNet ids, such as n02099601"
        )
    wnids = table.wnids()
    readable = np.array([row for row in range(table.size) if row not in table.bad], dtype=np.int64)
    return readable[_some_rows([wnids[row] for row in readable], members, key=f"{key} = {name}")]


def rows_in_folders(paths: Sequence[Path], name: str, *, key: str) -> NDArray[np.int64]:
    """Return which image files are of a subset, ascending, by the folders they lie in: `n02099601/images/1.jpeg`.

    The innermost folder that starts with an id counts. Raises ValueError, naming the setting `key`, for an unknown
    subset, for a file in no such folder, and for no files of the subset.
    """
    members = subset(name, key=key)
    wnids = []
    for path in paths:
        found = (re.match(r"n\d{8}(?!\d)", folder.name) for folder in path.parents)
        if (match := next(filter(None, found), None)) is None:
            raise ValueError(
                f"{key} = {name}: {path} is in no folder named by a WordNet id, such as n02099601"
            )
        wnids.append(match[0])
    return _some_rows(wnids, members, key=f"{key} = {name}")


def _some_rows(wnids: Sequence[str], members: Collection[str], *, key: str) -> NDArray[np.int64]:
    rows = rows_of(wnids, members, key=key)
    if len(rows) == 0:
        raise ValueError(
            f"{key}: none of the {len(wnids)} images belongs to it; they are of {len(set(wnids))} classes"
        )
    return rows


def _wnids_in_parquet(file: Path, *, key: str) -> list[str]:
    # Imported here so that the sources of `fedaux.data` may import this module.
    from fedaux.data.parquet import read_column, read_schema

    schema = read_schema(file)
    if "wnid" in schema.names:
        return read_column([file], "wnid")
    names = _label_names(schema.metadata or {})
    if "label" not in schema.names or not any(map(WNID.fullmatch, names)):
        raise ValueError(
            f"{key}: {file} has neither a column wnid nor a column label whose classes are named by WordNet ids; "
            f"it has {', '.join(schema.names)}"
        )
    labels = read_column([file], "label")
    if wrong := [label for label in labels if label is None or not 0 <= label < len(names)]:
        raise ValueError(f"{key}: {file} has a label {wrong[0]}; should be 0 to {len(names) - 1}")
    return [names[label] for label in labels]


def _label_names(metadata: dict[bytes, bytes]) -> list[str]:
    """Return the names of the classes as the Hugging Face hub keeps them in a file's schema, or none."""
    described: Any = json.loads(metadata.get(b"huggingface", b"{}"))
    label: Any = described.get("info", {}).get("features", {}).get("label", {})
    return [str(name) for name in label.get("names", [])] if isinstance(label, dict) else []
