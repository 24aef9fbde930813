"""Write the table of WordNet's nouns and its licence: `python docs/make_wordnet_table.py [FOLDER]`.

FOLDER holds WordNet 3.0's data.noun; without it, $WNSEARCHDIR or /usr/share/wordnet, where the
Debian package wordnet-base puts it. The file's format is described in WordNet's manual, wndb(5WN).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TABLES = Path(__file__).parents[1] / "src" / "fedaux" / "data"
FOLDER = Path(os.environ.get("WNSEARCHDIR", "/usr/share/wordnet"))


def read_parents(path: Path) -> dict[int, list[int]]:
    """Return the offset of each noun, with the offsets of its hypernyms: a class (@), or what it is
    an instance of (@i)."""
    content = path.read_bytes()
    parents: dict[int, list[int]] = {}
    position = 0
    for line in content.splitlines(keepends=True):
        if not line.startswith(b"  "):  # the licence
            fields = line.split(b" | ", maxsplit=1)[0].split()
            offset, num_words = int(fields[0]), int(fields[3], 16)
            if offset != position:
                raise ValueError(
                    f"{path}: offset {offset} stands at byte {position}; the file has been changed"
                )
            pointers = fields[5 + 2 * num_words :]
            assert len(pointers) == 4 * int(fields[4 + 2 * num_words]), line
            links = zip(pointers[::4], pointers[1::4], strict=True)
            parents[offset] = sorted(
                {int(target) for kind, target in links if kind in {b"@", b"@i"}}
            )
        position += len(line)
    return parents


def read_notice(path: Path) -> str:
    """Return the licence at the head of the file without line numbers; raises ValueError if it is
    not version 3.0."""
    with path.open(encoding="ascii") as file:
        lines = [line[2:].strip().partition(" ")[2] for line in file if line.startswith("  ")]
    notice = "\n".join(line.rstrip() for line in lines).strip() + "\n"
    if "WordNet 3.0 Copyright 2006 by Princeton University" not in notice:
        raise ValueError(f"{path}: is not of WordNet 3.0, whose offsets ImageNet's ids are")
    return notice


def table(parents: dict[int, list[int]]) -> dict[str, NDArray[np.generic]]:
    """Return the arrays that ship: gaps between offsets [N], numbers of parents [N], positions of
    parents [E]."""
    offsets = sorted(parents)
    position = {offset: number for number, offset in enumerate(offsets)}
    gaps = np.diff(offsets, prepend=0)
    assert gaps.max() < 2**16
    return {
        "gaps": gaps.astype("<u2"),
        "num_parents": np.array([len(parents[offset]) for offset in offsets], dtype="u1"),
        "parents": np.array(
            [position[parent] for offset in offsets for parent in parents[offset]], dtype="<u4"
        ),
    }


def main(folder: Path) -> None:
    """Write the table and the licence."""
    path = folder / "data.noun"
    notice = read_notice(path)
    np.savez_compressed(
        TABLES / "wordnet-nouns.npz", allow_pickle=False, **table(read_parents(path))
    )
    said = "wordnet-nouns.npz is derived from WordNet 3.0 (https://wordnet.princeton.edu), whose licence follows.\n\n"
    (TABLES / "WORDNET-LICENSE").write_text(said + notice, encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
