"""The cells: every run that a table needs, the most valuable first."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fedaux.config import Experiment
from fedaux.recipes import apply_overrides, find_recipe, flatten
from fedaux.sweep import cells_of
from reproduce import datasets, published
from reproduce.planning import public_settings, read_base, without_paths
from reproduce.studies import STUDIES
from reproduce.study import Axis, Study, Value

STAND_INS = {
    "stl10": "tinyimagenet32",
    "imagenet32": "tinyimagenet32",
    "bookcorpus": "book_sentences",
}
"""Data sets that replace the paper's in all cells."""
EDITIONS = {"fedaux2": 2, "fedcounts": 2}
"""Increase a method's number when it changes: results of an older edition are measured again.
Without a new number: `fedaux2` distills nothing if its first soft labels tell less than 0.01 nats;
0.17 and 0.19 were measured on CIFAR-10 with Tiny-ImageNet, at alpha = 0.1 and 0.01."""


@dataclass(frozen=True)
class Row:
    """A row of a table: a method with some settings."""

    method: str
    label: str = ""
    """Default: the method."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    """A shipped recipe whose tables apply to this row."""

    @property
    def name(self) -> str:
        """The label, or the method."""
        return self.label or self.method

    def settings(self) -> dict[str, Any]:
        """Return the changed settings; of a recipe its tables, not its methods and rounds."""
        if self.recipe is None:
            return dict(self.changes)
        text = find_recipe(self.recipe).read_text(encoding="utf-8")
        own = {key: value for key, value in tomllib.loads(text).items() if isinstance(value, dict)}
        return flatten(own) | dict(self.changes)


@dataclass(frozen=True)
class Cell:
    """One run: a method in one place of a table, with one seed."""

    table: str
    block: Value
    column: Value
    row: Row
    seed: int
    place: str
    """The keys of block and column, as in `alpha=0.01,C=0.4`."""
    data: str
    public: str

    @property
    def name(self) -> str:
        """Its results file and run directory: `table1/alpha=0.01,C=0.4,fedaux,seed=0`."""
        return f"{self.table}/{self.place},{self.row.name},seed={self.seed}"

    @property
    def edition(self) -> int:
        """The edition of its method."""
        return EDITIONS.get(self.row.method, 1)

    @property
    def recipe(self) -> Path:
        """The recipe that the table's cells share."""
        return STUDIES[self.table].grid.path()

    @cached_property
    def changes(self) -> dict[str, Any]:
        """The settings that differ from the recipe, by dotted key."""
        placed = {**self.block.changes, **self.column.changes}
        mu = published.tuned_proximal(self.row.method, placed.get("split.alpha", 0.01))
        return {
            "method": [self.row.method],
            "seeds": [self.seed],
            **placed,
            **({} if mu is None else {"local.proximal": mu}),
            **TABLE_CHANGES.get(self.table, {}),
            **self.row.settings(),
        }

    def settings(self, overrides: Sequence[str] = ()) -> dict[str, Any]:
        """Return every setting that is not a default, without paths: what the result is of."""
        table = _base(self.recipe)
        return {
            key: value
            for key, value in flatten({**table, **self.changes, **_parsed(overrides)}).items()
            if key != "name"
        }

    @cached_property
    def rounds(self) -> int:
        """The number of rounds."""
        return int(self.settings().get("rounds", 1))

    @property
    def h0(self) -> str:
        """The name of its h0: the network and the public data."""
        model = self.settings()["prototypes"][0]["model"]
        return f"{model}-{self.changes.get('auxiliary.wordnet', self.public)}"

    def checkpoint(self, data: Path) -> Path:
        """Return the file of its h0."""
        return data / "h0" / f"{self.h0}.safetensors"

    def missing(self, data: Path, *, pretrain: bool) -> str:
        """Return which input is missing, or an empty text."""
        try:
            datasets.locate(data, [self.data, self.public])
        except datasets.Missing as error:
            return "; ".join(str(error).splitlines()[1:])
        file = self.checkpoint(data)
        return "" if pretrain or file.is_file() else f"{file}; --pretrain trains it"

    def experiment(self, data: Path, overrides: Sequence[str] = ()) -> Experiment:
        """Return the experiment on the data below a folder."""
        raw = without_paths(read_base(self.recipe, ["output.models=false"]))
        found = datasets.locate(data, [self.data, self.public])
        point = self.changes | found[self.data].settings("data")
        point |= public_settings(found[self.public], raw)
        if (file := self.checkpoint(data)).is_file():
            point["pretraining.checkpoint"] = str(file.resolve())
        (cell,) = cells_of(raw, [point | _parsed(overrides)])
        return cell.experiment

    def command(self) -> str:
        """Return the command that runs it, with DIR for the folder of the data."""
        root = Path(__file__).parents[1]
        own = {
            "data.path": f"DIR/{self.data}",
            "auxiliary.path": f"DIR/{self.public}",
            "pretraining.checkpoint": f"DIR/h0/{self.h0}.safetensors",
        }
        sets = " ".join(
            f"--set '{key}={_toml(value)}'" for key, value in (self.changes | own).items()
        )
        return f"fedaux run {self.recipe.relative_to(root)} {sets}"


@dataclass(frozen=True)
class Part:
    """Cells of one table that are equally valuable, column by column."""

    table: str
    blocks: Sequence[str]
    columns: Sequence[str]
    rows: Sequence[Row]
    seeds: Sequence[int] = (0,)

    def cells(self) -> Iterator[Cell]:
        """Yield the cells in order."""
        study = STUDIES[self.table]
        for seed in self.seeds:
            for block in _values(study.grid.blocks, self.blocks):
                for column in _values(study.grid.columns, self.columns):
                    for row in self.rows:
                        yield _cell(study, block, column, row, seed)


def _values(axis: Axis, keys: Sequence[str]) -> list[Value]:
    """Return the values of an axis in the order of the keys; all without keys."""
    at = {value.key: value for value in (*axis.values, *axis.ours)}
    return [at[key] for key in keys] if keys else list(axis.values)


def _cell(study: Study, block: Value, column: Value, row: Row, seed: int) -> Cell:
    grid = study.grid
    named = [
        (axis.name, value.key) for axis, value in zip(grid.axes(), (block, column), strict=True)
    ]
    place = ",".join(f"{axis}={key}" for axis, key in named if axis != "table")
    data, public = (STAND_INS.get(name, name) for name in grid.data_of(block, column))
    return Cell(study.name, block, column, row, seed, place.replace(" ", "-"), data, public)


@lru_cache
def _base(recipe: Path) -> dict[str, Any]:
    """Return the settings of a recipe without paths, by dotted key."""
    return flatten(without_paths(read_base(recipe, ())))


def _parsed(overrides: Sequence[str]) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    if problems := apply_overrides(raw, overrides):
        raise ValueError("\n".join(problems))
    return flatten(raw)


def _toml(value: Any) -> str:
    """Return a value as `--set` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}={_toml(item)}" for key, item in value.items()) + "}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


TABLE_CHANGES: dict[str, dict[str, Any]] = {
    "cifar100": {"data.test_fraction": 0.1667},  # 10,000 of 60,000 where there is no test file
}

FEDAUX = (
    Row("fedaux"),
    Row(
        "fedaux+logits",
        "fedaux+logits-authors-scores",
        {"certainty.mechanism": "released-code"},
    ),
    Row("fedaux+m"),
)
FEDAUX2 = Row("fedaux2", recipe="cifar10-fedaux2")
FROM_H0 = tuple(map(Row, ("fedprox+p", "feddf+p", "fedavg+p", "fedbe+p")))
SCRATCH = tuple(map(Row, ("fedprox", "feddf", "fedavg", "fedbe")))
FAIR = tuple(map(Row, ("fedavg+p@sgd-0.3", "feddf+p@sgd-0.3")))
"""Peers with SGD, whose rate was chosen on a fifth of the training data held out: `fedavg+p` has
52.5 after 30 rounds (C = 0.4), 50.2 at a rate of 0.1, 46.5 at 0.03."""
TABLE1 = (*FEDAUX, *FROM_H0, FEDAUX2, *SCRATCH)
CIFAR100 = (*FEDAUX, Row("fedavg"), Row("feddf+p"), Row("feddf"), FEDAUX2)
TABLE2 = (*FEDAUX[:2], Row("feddf+p"), Row("feddf"), FEDAUX2)
TABLE3 = (*FEDAUX[:2], *FROM_H0[:3], FEDAUX2, *SCRATCH[:3])
LINEAR = (*FEDAUX, *FROM_H0[:3], Row("fedaux2@sgd-0.1"), Row("scaffold+p@sgd-0.1"))
CURVES = (*FEDAUX[:2], Row("feddf+p"), Row("feddf"))
SUBSETS = ("CIFAR-100", "Dogs", "Devices", "Structures", "Birds", "Invertebrates")
LATER = (1, 2)
PARTS = (
    Part("table1", ["0.01"], ["0.4"], TABLE1),
    Part("table1", ["0.01"], ["0.4"], FAIR),
    Part("table1", ["0.01"], ["0.8", "0.2"], TABLE1),
    Part("table1", ["100"], ["0.4", "0.2", "0.8"], TABLE1),
    Part("cifar100", [], ["0.01"], CIFAR100),
    Part("table1", ["0.01"], ["0.4"], TABLE1, LATER),
    Part("cifar100", [], ["0.04", "0.16", "0.64", "2.56", "10.24"], CIFAR100),
    Part("table2", ["0.01"], SUBSETS, TABLE2),
    Part("table3", [], ["0.01"], TABLE3),
    Part("nlp", ["ag_news"], [], FEDAUX[:1] + FROM_H0[1:3]),
    Part("linear", [], [], LINEAR),
    Part("architectures", ["ResNet-8"], [], CURVES),
    Part("table1", ["0.01"], ["0.8", "0.2"], TABLE1, LATER),
    Part("cifar100", [], ["0.01"], CIFAR100, LATER),
    Part("table3", [], ["0.04", "0.16", "10.24"], TABLE3),
    Part("table2", ["100"], SUBSETS, TABLE2),
    Part("table1", ["100"], ["0.4", "0.2", "0.8"], TABLE1, LATER),
    Part("table2", ["0.01"], SUBSETS, TABLE2, LATER),
    Part("table3", [], ["0.01"], TABLE3, LATER),
    Part("nlp", ["ag_news"], [], FEDAUX[:1] + FROM_H0[1:3], LATER),
)


def all_cells() -> list[Cell]:
    """Return all cells, the most valuable first."""
    return [cell for part in PARTS for cell in part.cells()]
