"""As much Markdown as experiments write, read once for the page and for LaTeX: headings, paragraphs, lists, tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

LONG = 24
"""Characters from which a text in a cell may be broken into lines."""


@dataclass(frozen=True)
class Heading:
    """A heading; the title has level 1."""

    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """Lines of text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """A table: its head and its rows, all of one length."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def words(self) -> list[bool]:
        """Return which columns hold words: they stand left, numbers right."""
        listed = [
            any(re.search(r"[A-Za-z]{3}", row[column]) for row in self.rows) for column in range(len(self.header))
        ]
        return [True, *listed[1:]]


Block = Heading | Paragraph | Items | Grid


def read(markdown: str) -> Iterator[Block]:
    """Yield the parts of a document in order."""
    for block in re.split(r"\n\s*\n", markdown.strip()):
        for kind, group in groupby(block.splitlines(), key=_kind):
            lines = list(group)
            if kind == "heading":
                for line in lines:
                    yield Heading(len(line) - len(line.lstrip("#")), line.lstrip("# "))
            elif kind == "list":
                yield Items(tuple(line[2:] for line in lines))
            elif kind == "table":
                header, _, *rows = [_cells(line) for line in lines]
                yield Grid(header, tuple(rows))
            else:
                yield Paragraph(" ".join(lines))


def title_of(blocks: Sequence[Block]) -> str:
    """Return the title of a document."""
    return next((block.text for block in blocks if isinstance(block, Heading) and block.level == 1), "fedaux")


def inline(text: str) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a line with what they are: bold, code, or plain."""
    for piece in re.split(r"(\*\*.+?\*\*|`.+?`)", text):
        if piece.startswith("**") and piece.endswith("**") and len(piece) > 4:
            yield "bold", piece[2:-2]
        elif piece.startswith("`") and piece.endswith("`") and len(piece) > 2:
            yield "code", piece[1:-1]
        elif piece:
            yield "plain", piece


def _kind(line: str) -> str:
    for start, kind in (("#", "heading"), ("- ", "list"), ("|", "table")):
        if line.startswith(start):
            return kind
    return "text"


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip()[1:-1].split(" | "))
