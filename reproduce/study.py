"""A study: a table or figure of the paper as a grid of runs, with a quick version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from fedaux.config import Experiment
from fedaux.config_errors import nearest
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.recipes import load_experiment, parse_value

RECIPES = Path(__file__).parent / "recipes"


def quick_base(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Return what the quick version of an experiment is based on, with --set applied."""
    return load_experiment(RECIPES / f"{name}-quick.toml", overrides=overrides)


@dataclass(frozen=True)
class Value:
    """A value of an axis: its label, and the settings and data sets that it stands for."""

    key: str
    """Its name for `--only`."""
    label: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    data: str | None = None
    auxiliary: str | None = None
    central: bool = True
    """Whether centralised training makes sense here, if the study has it."""


@dataclass(frozen=True)
class Axis:
    """The settings that vary over the columns or the blocks of a table."""

    name: str
    values: tuple[Value, ...]
    ours: tuple[Value, ...] = ()
    """Values that the paper does not have: run only if `--only` names them."""

    def only(self, wanted: Sequence[str]) -> Axis:
        """Return the axis with the wanted values. Raises ValueError for an unknown one."""
        both = (*self.values, *self.ours)
        keys = [value.key for value in both]
        for key in wanted:
            if key not in keys:
                guess = nearest(key, keys) or f"; it has {', '.join(keys)}"
                raise ValueError(f"--only {self.name}={key}: there is no such value{guess}")
        return replace(self, values=tuple(value for value in both if value.key in wanted), ours=())


@dataclass(frozen=True)
class Grid:
    """The runs of a study: every block, column, method and seed."""

    recipe: str
    """A file of `recipes/`: the settings that all runs share."""
    blocks: Axis
    columns: Axis
    data: str = "cifar10"
    auxiliary: str = "stl10"
    cut: str = ""
    """What a quick version leaves out."""

    def axes(self) -> tuple[Axis, Axis]:
        """Return both axes."""
        return self.blocks, self.columns

    def path(self) -> Path:
        """Return the file of the recipe."""
        return RECIPES / f"{self.recipe}.toml"

    def data_sets(self) -> list[str]:
        """Return the names of all data sets that the runs read."""
        named = [self.data_of(block, column) for block, column in self.points()]
        return list(dict.fromkeys(name for pair in named for name in pair))

    def points(self) -> Iterator[tuple[Value, Value]]:
        """Yield block and column; runs that share public data are adjacent."""
        yield from sorted(
            product(self.blocks.values, self.columns.values),
            key=lambda pair: self.data_of(*pair)[1],
        )

    def data_of(self, block: Value, column: Value) -> tuple[str, str]:
        """Return the data sets of the clients and of the server."""
        return (
            block.data or column.data or self.data,
            block.auxiliary or column.auxiliary or self.auxiliary,
        )


@dataclass(frozen=True)
class Study:
    """A table or figure of the paper: its grid, a quick one, and how both are shown."""

    name: str
    shows: str
    grid: Grid
    quick: Grid
    quick_time: str
    """Measured; on 2 cores."""
    figure: Literal["dots", "lines", "curves", "heat"] = "dots"
    central: bool = False
    """Whether centralised training is shown beside the federation."""
    left_open: tuple[str, ...] = ()
    """What the paper leaves open, and what we do."""
    needs_recipe: str | None = None
    """A recipe of the package that the study needs."""


def narrowed(grid: Grid, only: Sequence[str]) -> tuple[Grid, tuple[str, ...] | None]:
    """Return the part of a grid, and the methods if named, of `--only alpha=0.01 --only
    method=[fedaux,feddf]`."""
    methods: tuple[str, ...] | None = None
    seen: set[str] = set()
    for text in only:
        name, equals, values = text.partition("=")
        parsed = parse_value(values)
        wanted = [
            f"{value:g}" if isinstance(value, int | float) else str(value)
            for value in (parsed if isinstance(parsed, list) else [parsed])
        ]
        axes = {axis.name: axis for axis in grid.axes()}
        if not equals or not wanted or name not in (*axes, "method"):
            raise ValueError(
                f"--only {text}: should be KEY=VALUE with one of {', '.join([*axes, 'method'])}"
            )
        if name in seen:
            raise ValueError(f"--only {text}: {name} is given twice; several are {name}=[A,B]")
        seen.add(name)
        if name == "method":
            methods = _known_methods(wanted, option="--only method=")
        elif grid.blocks.name == name:
            grid = replace(grid, blocks=grid.blocks.only(wanted))
        else:
            grid = replace(grid, columns=grid.columns.only(wanted))
    return grid, methods


def chosen_methods(
    recipe: Sequence[str], only: Sequence[str] | None, also: Sequence[str]
) -> list[str]:
    """Return the recipe's methods that `--only` leaves, and those that `--also` adds."""
    if only is None:
        only = recipe
    for name in only:
        if name not in recipe:
            raise ValueError(
                f"--only method={name}: not one of {', '.join(recipe)}; --also {name} adds it"
            )
    kept = [name for name in recipe if name in only]
    return list(dict.fromkeys([*kept, *_known_methods(also, option="--also ")]))


def relevant(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed settings that a method reads."""
    return {key: value for key, value in changes.items() if not asks_of(method).ignores(key)}


def _known_methods(names: Sequence[str], *, option: str) -> tuple[str, ...]:
    for name in names:
        if name not in METHODS:
            guess = nearest(name, METHODS, most=3)
            raise ValueError(f"{option}{name}: no such method{guess}; see fedaux methods")
    return tuple(names)
