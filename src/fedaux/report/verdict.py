"""What the parts of a method add, in words: scores and distillation; distance to the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any

from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.asks import Asks

LEAST_POINTS = 0.05
"""Differences that round to 0.0 points are ties, whatever the seeds say."""
ONE_SEED_POINTS = 1.0
"""With one seed there is no standard error; smaller differences are called ties."""
SCORING = ("releases",)
"""Fields of `Asks` in which a method with scores may differ from its twin with equal weights."""
DISTILLING = (*SCORING, "distills", "remembers")
"""Fields in which a method that distills may differ from one that only averages, if the difference
is to be the merit of distillation."""

Accuracies = Mapping[str, Mapping[int, float]]
"""The accuracy of the last round, by method and seed."""


def last_accuracies(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return the last measured accuracy of each method and seed in the rounds of a run."""
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: int(row["round"])):
        if row.get("accuracy") is not None:
            found.setdefault(str(row["method"]), {})[int(row["seed"])] = float(row["accuracy"])
    return found


def chance_warnings(rows: Iterable[Mapping[str, Any]], test: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each row of a summary that is no better than the most frequent test
    class by more than two standard errors."""
    share, examples = test["largest_class"], test["examples"]
    chance = share + 2 * math.sqrt(share * (1 - share) / examples)
    return [
        f"{row['method']} is at chance: {100 * row['accuracy_mean']:.1f} % in the last round, and "
        f"{100 * share:.1f} % of the test examples have the most frequent class; see the page "
        "Tuning"
        for row in rows
        if row["accuracy_mean"] is not None and row["accuracy_mean"] <= chance
    ]


def verdict(accuracies: Accuracies, *, test_examples: int | None = None) -> list[str]:
    """Return up to three sentences: what scores add over equal weights, what distillation adds
    over averaging, and where that leaves the best method between training alone and pooled data.

    Methods are compared over the seeds that both have. A difference within its standard error, over
    seeds or over so many test examples, is called a tie. Sentences whose methods were not run are
    left out.
    """
    compared = partial(_difference, accuracies, test_examples=test_examples)
    run = {name: asks_of(name) for name, own in accuracies.items() if own and name in METHODS}
    scored = _best(accuracies, run, lambda asks: asks.distills and bool(asks.releases))
    equal = _nearest(
        accuracies, run, scored, SCORING, lambda one: one.distills and not one.releases
    ) or _best(accuracies, run, lambda asks: asks.distills and not asks.releases)
    distilled = scored or equal
    averaged = _best(
        accuracies, run, lambda one: one.trains and not one.distills and not one.is_bound
    )
    sentences = []
    if scored and equal and run[scored].pretrained == run[equal].pretrained:
        exact = _differ(run[scored], run[equal], SCORING) == 0
        what = "Weighting clients by their scores", "equal weights"
        near = "the nearest method with equal weights"
        sentences.append(f"{_effect(compared, scored, equal, *what, '' if exact else near)}.")
    if distilled and averaged:
        exact = _differ(run[distilled], run[averaged], DISTILLING) == 0
        what = f"Distillation{' with scores' if scored else ''}", "averaging alone"
        best = "the best method that only averages"
        effect = _effect(compared, distilled, averaged, *what, "" if exact else best)
        also = ""
        if scored and equal and run[equal].pretrained == run[averaged].pretrained:
            found = compared(equal, averaged)
            also = f"; {equal} {_compared(found, averaged)}" if found else ""
        sentences.append(f"{effect}{also}.")
    hero = scored or _best(accuracies, run, lambda asks: not asks.is_bound)
    if hero:
        sentences.append(_against_bounds(accuracies, compared, run, hero))
    return [sentence for sentence in sentences if sentence.strip(".")]


@dataclass(frozen=True)
class _Difference:
    """First minus second method, in points, over the seeds that both have."""

    points: float
    error: float | None
    """Standard error over seeds; None for one seed."""
    sampling: float
    """Standard error over test examples. Both methods see the same ones; half of the variance of
    their errors is taken to be common."""
    examples: int | None
    """Number of test examples, if it is known."""
    first: float
    second: float
    """Mean accuracies in percent."""

    @property
    def tie(self) -> bool:
        return self._tie_of_seeds or self._within(self.sampling)

    @property
    def _tie_of_seeds(self) -> bool:
        error = ONE_SEED_POINTS if self.error is None else self.error
        return self._within(max(error, LEAST_POINTS))

    def _within(self, limit: float) -> bool:
        return abs(self.points) < limit or math.isclose(abs(self.points), limit)

    @property
    def tied(self) -> str:
        """The size of a tie and, if the number of test examples decides, what these can tell."""
        few = f", less than the {self.sampling:.1f} that {self.examples} test examples can resolve"
        return self.size(sign=True) + ("" if self._tie_of_seeds else few)

    def size(self, *, sign: bool = False) -> str:
        points = self.points if sign else abs(self.points)
        error = " (one seed)" if self.error is None else f" ± {self.error:.1f}"
        number = f"{points:+.1f}" if sign else f"{points:.1f}"
        return f"{number} points{error}" if self.error is None else f"{number}{error} points"


Compared = Callable[[str, str], _Difference | None]


def _difference(
    accuracies: Accuracies, first: str, second: str, *, test_examples: int | None
) -> _Difference | None:
    seeds = sorted(accuracies[first].keys() & accuracies[second].keys())
    if not seeds:
        return None
    ones, others = ([100 * accuracies[name][seed] for seed in seeds] for name in (first, second))
    pairs = [one - other for one, other in zip(ones, others, strict=True)]
    error = stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    means = fmean(ones), fmean(others)
    variance = sum(mean * (100 - mean) for mean in means)
    sampling = math.sqrt(variance / 2 / test_examples) if test_examples else 0.0
    return _Difference(fmean(pairs), error, sampling, test_examples, *means)


def _effect(compared: Compared, first: str, second: str, what: str, over: str, rival: str) -> str:
    """Return what a part adds or, if the second method is called a rival because other parts
    differ, too, only how the two compare."""
    found = compared(first, second)
    if found is None:
        return ""
    figures = f"{first} {found.first:.1f} %, {second} {found.second:.1f} %"
    if rival:
        return f"{first} {_compared(found, f'{second}, {rival}')} ({figures})"
    if found.tie:
        return f"{what} ties with {over}, {found.tied} ({figures})"
    verb = "adds" if found.points > 0 else "loses"
    joint = "over" if found.points > 0 else "against"
    return f"{what} {verb} {found.size()} {joint} {over} ({figures})"


def _against_bounds(
    accuracies: Accuracies, compared: Compared, run: Mapping[str, Asks], hero: str
) -> str:
    parts, shown = [], 0.0
    for exchange, bound in (("nothing", "training alone"), ("data", "training on pooled data")):
        fits = _exchanges(exchange)
        name = _nearest(accuracies, run, hero, (), fits) or _best(accuracies, run, fits)
        found = compared(hero, name) if name else None
        if found is not None:
            parts.append(_compared(found, f"{bound} ({name}, {found.second:.1f} %)"))
            shown = found.first
    return f"{hero} ({shown:.1f} %) {' and '.join(parts)}." if parts else ""


def _exchanges(kind: str) -> Callable[[Asks], bool]:
    return lambda asks: asks.shares == kind


def _compared(found: _Difference, rival: str) -> str:
    if found.tie:
        return f"ties with {rival}, {found.tied}"
    return f"is {found.size()} {'above' if found.points > 0 else 'below'} {rival}"


def _best(
    accuracies: Accuracies, run: Mapping[str, Asks], fits: Callable[[Asks], bool]
) -> str | None:
    """Return the most accurate method of a kind."""
    names = [name for name, method in run.items() if fits(method)]
    return max(names, key=lambda name: fmean(accuracies[name].values()), default=None)


def _nearest(
    accuracies: Accuracies,
    run: Mapping[str, Asks],
    name: str | None,
    free: tuple[str, ...],
    fits: Callable[[Asks], bool],
) -> str | None:
    """Return the method of a kind with the same start that differs least besides `free` fields."""
    if name is None:
        return None
    same = [one for one in run if run[one].pretrained == run[name].pretrained and fits(run[one])]
    return min(
        same,
        key=lambda one: (
            _differ(run[name], run[one], free),
            -fmean(accuracies[one].values()),
        ),
        default=None,
    )


def _differ(first: Asks, second: Asks, free: tuple[str, ...]) -> int:
    """Return in how many fields, besides the free ones, two methods differ."""
    ones, others = asdict(first), asdict(second)
    return sum(ones[key] != others[key] for key in ones if key not in free)
