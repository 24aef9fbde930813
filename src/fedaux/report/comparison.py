"""Several runs to be compared: rows over seeds, the settings they differ in, and who is ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedaux.report import html
from fedaux.report.records import Folder, group

Row = dict[str, Any]
SYMBOLS = {
    "split.alpha": "α",
    "split.num_clients": "clients",
    "participation_rate": "C",
    "certainty.epsilon": "ε",
    "certainty.delta": "δ",
}
"""What the paper calls a setting; the others go by the last word of their key."""


class Comparison:
    """What the sections of the page share: rows over seeds, and what there is to compare."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.records = folder.records
        self.rows: list[Row] = sorted(
            (row for row in group(self.records) if row["accuracy_mean"] is not None),
            key=lambda row: -row["accuracy_mean"],
        )
        self.keys = folder.keys
        ends = [SYMBOLS.get(key, key.rpartition(".")[2]) for key in self.keys]
        self.short = {key: end if ends.count(end) == 1 else key for key, end in zip(self.keys, ends, strict=True)}
        self.values = {key: _ordered(row[key] for row in self.rows) for key in self.keys}
        places = {key: {value_text(value): place for place, value in enumerate(self.values[key])} for key in self.keys}
        settings = {
            self.setting(row): tuple(places[key][value_text(row[key])] for key in self.keys) for row in self.rows
        }
        self.settings = sorted(settings, key=lambda setting: settings[setting])
        self.several_seeds = any(row["seeds_done"] > 1 for row in self.rows)
        self.ranks = mean_ranks(self.rows, self.setting)
        listed = dict.fromkeys(row["method"] for row in self.rows)
        self.methods = sorted(listed, key=lambda method: self.ranks.get(method, math.inf))

    def setting(self, row: Mapping[str, Any]) -> str:
        """The values of the swept keys of a row, as a person reads them."""
        return ", ".join(f"{self.short[key]} = {value_text(row[key])}" for key in self.keys)

    def find(self, method: str, setting: str) -> Row | None:
        """The row of a method at a setting."""
        return next((row for row in self.rows if row["method"] == method and self.setting(row) == setting), None)

    def spread(self, row: Row, measure: str = "accuracy") -> str:
        """Mean and deviation over seeds in percent."""
        return html.spread(row[f"{measure}_mean"], row[f"{measure}_std"] if row["seeds_done"] > 1 else None)


def mean_ranks(rows: Sequence[Row], setting: Callable[[Row], str]) -> dict[str, float]:
    """The mean place of each method over the settings in which all methods were measured, 1 for the best."""
    methods = {row["method"] for row in rows}
    by_setting: dict[str, dict[str, float]] = {}
    for row in rows:
        by_setting.setdefault(setting(row), {})[row["method"]] = row["accuracy_mean"]
    whole = [found for found in by_setting.values() if found.keys() == methods]
    if not whole:
        return {}

    def rank(found: Mapping[str, float], method: str) -> float:
        above = sum(value > found[method] for value in found.values())
        level = sum(value == found[method] for value in found.values())
        return above + (level + 1) / 2

    return {method: sum(rank(found, method) for found in whole) / len(whole) for method in methods}


def _ordered(values: Iterable[Any]) -> list[Any]:
    """Different values, numbers in their order and before words, words in the order they come."""
    unique = list({value_text(value): value for value in values}.values())
    numbers = [value for value in unique if isinstance(value, int | float) and not isinstance(value, bool)]
    return [*sorted(numbers), *(value for value in unique if value not in numbers)]


def value_text(value: Any) -> str:
    """A setting as a person writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):  # three digits where they say it all: different values must not read alike
        return short if float(short := html.short(value).replace("∞", "inf")) == value else repr(value)
    if isinstance(value, list):
        return "+".join(map(value_text, value))
    if isinstance(value, Mapping):  # a prototype by its name, with what else it says
        rest = [value_text(item) for key, item in value.items() if key not in ("name", "options", "share")]
        rest += [f"{key}={value_text(item)}" for key, item in (value.get("options") or {}).items()]
        return f"{value.get('name', '')} ({', '.join(rest)})".replace(" ()", "").strip()
    return "–" if value is None else str(value)
