"""The figures that the paper prints, from `published.toml`, to compare with measured ones."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Printed:
    """An accuracy in % as printed, with its deviation if it has one."""

    text: str
    mean: float
    deviation: float | None = None

    @property
    def spaced(self) -> str:
        """The figure with spaces: 71.2 ± 2.1."""
        return self.text.replace("±", " ± ")


@lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """Return the whole file."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def where(study: str) -> str:
    """Return where in the paper a study's figures are, and what they are; empty if it prints
    none."""
    table = tables().get(study, {})
    return f"{table['where']}: {table['says']}" if table else ""


def printed(study: str, block: str, column: str, method: str) -> Printed | None:
    """Return the figure of one cell of a table, or one from the text; None if there is none."""
    claim = tables()["claims"].get(f"{study}, {block}, {column}, {method}")
    if claim is not None:
        return parse(claim["value"])
    table = tables().get(study, {}).get("blocks", {}).get(block, {})
    if column not in table.get("columns", ()) or method not in table:
        return None
    return parse(table[method][table["columns"].index(column)])


def ranking(study: str, block: str, column: str) -> dict[str, float]:
    """Return the printed figures of all methods in one column; of `hpo` the best
    combinations' figures."""
    if study == "hpo":
        best = tables()["hpo"]["blocks"].get(block, {})
        return {method: float(row[-1]) for method, row in best.items() if method != "columns"}
    start = f"{study}, {block}, {column}, "
    named = {key.removeprefix(start) for key in tables()["claims"] if key.startswith(start)}
    named |= tables().get(study, {}).get("blocks", {}).get(block, {}).keys() - {"columns"}
    figures = {method: printed(study, block, column, method) for method in sorted(named)}
    return {method: figure.mean for method, figure in figures.items() if figure is not None}


def tuned_proximal(method: str, alpha: float) -> float | None:
    """Return the mu that the paper's search found best for a method; None if it prints none.

    It searched at alpha = 0.01 and 100; other values take that of the nearer one, by ratio: up to 1
    that of 0.01.
    """
    searched = {float(block.removeprefix("α = ")): block for block in tables()["hpo"]["blocks"]}
    nearest = min(sorted(searched), key=lambda at: round(abs(math.log(alpha / at)), 9))
    table = tables()["hpo"]["blocks"][searched[nearest]]
    text = table[method][table["columns"].index("proximal")] if method in table else "-"
    return None if text == "-" else float(text)


def parse(text: str) -> Printed:
    """Read "71.2±2.1" or "71.2"."""
    mean, _, deviation = text.partition("±")
    return Printed(text, float(mean), float(deviation) if deviation else None)
