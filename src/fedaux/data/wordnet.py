"""Subsets of ImageNet by WordNet id (appendix, generating Imagenet subsets).

An ImageNet class is the letter n and the offset of a noun in WordNet 3.0. A subset is a noun and
everything below it (hyponyms and instances). The table of parents of all nouns is derived from
WordNet 3.0, Copyright 2006 by Princeton University: see `WORDNET-LICENSE`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files as package_files
from pathlib import Path
from typing import TYPE_CHECKING

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
    """The nouns of WordNet 3.0: offsets [N] ascending; edges from `children` [E] to `parents`
    [E]."""

    offsets: NDArray[np.int64]
    children: NDArray[np.int64]
    parents: NDArray[np.int64]

    def position(self, wnid: str) -> int | None:
        """Return the position of a noun in `offsets`, or None if there is no such noun."""
        if not (match := WNID.fullmatch(wnid)):
            return None
        place = int(np.searchsorted(self.offsets, offset := int(match[1])))
        return place if place < len(self.offsets) and self.offsets[place] == offset else None


@cache
def nouns() -> Nouns:
    """Read the table; offsets are stored as differences, parents as positions."""
    with (
        package_files("fedaux.data").joinpath("wordnet-nouns.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as table,
    ):
        offsets = np.cumsum(table["gaps"], dtype=np.int64)
        children = np.repeat(np.arange(len(offsets)), table["num_parents"])
        return Nouns(offsets=offsets, children=children, parents=table["parents"].astype(np.int64))


def subset(name: str, *, key: str = "subset") -> frozenset[str]:
    """Return the ids of a noun, given by a name in `ROOTS` or an id, and of everything below it.

    Raises ValueError with the setting `key` for an unknown noun.
    """
    graph = nouns()
    root = graph.position(ROOTS.get(name, name))
    if root is None:
        guess = nearest(name, [*ROOTS, *ROOTS.values()])
        allowed = f"; should be {', '.join(ROOTS)}, or the id of a noun such as {ROOTS['dogs']}"
        raise ValueError(f"{key} = {name}: no such subset{guess or allowed}")
    reached = np.zeros(len(graph.offsets), dtype=np.bool_)
    fresh = np.array([root])
    while len(fresh):  # one level per step; a noun can have several parents
        reached[fresh] = True
        below = graph.children[reached[graph.parents]]
        fresh = below[~reached[below]]
    return frozenset(f"n{offset:08d}" for offset in graph.offsets[reached])


def rows_of(
    wnids: Sequence[str], members: Collection[str], *, key: str = "wnids"
) -> NDArray[np.int64]:
    """Return the rows, ascending, whose id [N] is a member.

    Raises ValueError with the first row whose id is not a noun of WordNet 3.0.
    """
    graph = nouns()
    strange = {
        wnid for wnid in set(wnids) if not isinstance(wnid, str) or graph.position(wnid) is None
    }
    if strange:
        row = next(row for row, wnid in enumerate(wnids) if wnid in strange)
        raise ValueError(
            f"{key}: row {row} has {wnids[row]!r}; should be a WordNet id such as n02099601"
        )
    members = frozenset(members)
    return np.array([row for row, wnid in enumerate(wnids) if wnid in members], dtype=np.int64)


def rows_in_table(table: Table, name: str, *, key: str) -> NDArray[np.int64]:
    """Return the readable rows of a subset, ascending, by the ids of the table's rows.

    Raises ValueError with the setting `key` for an unknown subset, a table without ids, or no rows.
    """
    members, key = subset(name, key=key), f"{key} = {name}"
    if table.wnids is None:
        raise ValueError(
            f"{key}: {table.files[0]} has no column wnid and no classes named by WordNet ids such "
            "as n02099601"
        )
    try:
        wnids = table.wnids()
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    readable = np.array([row for row in range(table.size) if row not in table.bad], dtype=np.int64)
    rows = rows_of([wnids[row] for row in readable], members, key=key)
    if len(rows) == 0:
        raise ValueError(
            f"{key}: none of the {len(readable)} images, of {len(set(wnids))} classes, belongs to "
            "it"
        )
    return readable[rows]


def id_of_folder(file: Path) -> str:
    """Return the id in the name of the innermost folder that starts with one, such as
    `n02099601/images/1.jpeg`. Raises ValueError without such a folder."""
    found = (re.match(r"n\d{8}(?!\d)", folder.name) for folder in file.parents)
    if (match := next(filter(None, found), None)) is None:
        raise ValueError(f"{file} is in no folder named by a WordNet id, such as n02099601")
    return match[0]
