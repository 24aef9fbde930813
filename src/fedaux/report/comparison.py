"""Sections that compare runs: the effect of settings, accuracy against privacy and against
bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from fedaux.formatting import as_number, megabytes, setting_text, short
from fedaux.report import figures, html
from fedaux.report.figures import Mark
from fedaux.report.results import Runs, group_key, settings_of
from fedaux.report.tables import Table

MOST_MAPS = 4
ACCURACIES = ("accuracy_mean", "accuracy_std", "accuracy_max_mean")
NO_EPSILON = -1.0  # the epsilon of methods that release nothing through a privacy mechanism


def effect_of_settings(runs: Runs) -> str:
    """Return the section on swept keys: heat maps of the two with the largest effect, lines for
    one."""
    wide = [key for key in runs.keys if len(runs.values[key]) > 1]
    if not wide or (
        wide == ["certainty.epsilon"] and against_privacy(runs)
    ):  # the budget has a separate figure
        return ""
    if len(wide) == 1:
        return _one_key(runs, wide[0])
    row_key, column_key = sorted(
        sorted(wide, key=lambda key: -_effect(runs, key))[:2], key=wide.index
    )
    if len(runs.values[row_key]) > len(runs.values[column_key]):
        row_key, column_key = column_key, row_key
    rows, columns = (list(map(setting_text, runs.values[key])) for key in (row_key, column_key))
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in runs.rows:
        found[row["method"], setting_text(row[row_key]), setting_text(row[column_key])].append(
            row["accuracy_mean"]
        )
    means = {place: sum(values) / len(values) for place, values in found.items()}
    panels = [
        (
            method,
            np.array(
                [[means.get((method, one, other), math.nan) for other in columns] for one in rows]
            ),
        )
        for method in runs.methods
    ]
    labels = runs.short[row_key], runs.short[column_key]
    figure = figures.heat_maps(panels[:MOST_MAPS], rows=rows, columns=columns, labels=labels)
    caption = f"Test accuracy in the last round, %, over {labels[0]} and {labels[1]}; "
    caption += "the best of each method is bold."
    if others := [runs.short[key] for key in wide if key not in (row_key, column_key)]:
        over = " and ".join(others)
        caption += f" These two have the largest effect; each number is a mean over {over}."
    if len(panels) > MOST_MAPS:
        caption += f" Only the {MOST_MAPS} methods with the best mean rank are drawn."
    data = [(*place, f"{mean:.6g}", len(found[place])) for place, mean in means.items()]
    numbers = Table(("method", row_key, column_key, "accuracy", "settings"), data)
    title = f"Effect of {labels[0]} and {labels[1]}"
    return html.section("settings", title, html.picture(figure, "settings", caption, numbers))


def _one_key(runs: Runs, key: str) -> str:
    texts, name = list(map(setting_text, runs.values[key])), runs.short[key]
    costs = {row["key"]: float(texts.index(setting_text(row[key]))) for row in runs.rows}
    marks, numbers = _marks(runs, costs, key, apart=(key,))
    figure = figures.against_values(marks, xlabel=name, names=dict(enumerate(texts)))
    deviation = ", mean and standard deviation over seeds," if runs.several_seeds else ""
    caption = f"Test accuracy in the last round{deviation} against {name}."
    return html.section(
        "settings", f"Effect of {name}", html.picture(figure, "settings", caption, numbers)
    )


def _effect(runs: Runs, key: str) -> float:
    """Return the range of the mean accuracies of a key's values."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in runs.rows:
        found[setting_text(row[key])].append(row["accuracy_mean"])
    means = [sum(values) / len(values) for values in found.values()]
    return max(means) - min(means)


def against_privacy(runs: Runs) -> str:
    """Return accuracy against epsilon, if there are several runs and budgets."""
    costs = {row["key"]: as_number(row["epsilon"], missing=NO_EPSILON) for row in runs.rows}
    names = {
        cost: "nothing\nreleased" if cost == NO_EPSILON else short(cost)
        for cost in sorted(set(costs.values()))
    }
    if runs.only or len(set(names.values())) < 2:
        return ""
    apart = tuple(
        key for key in runs.keys if key.startswith(("certainty.epsilon", "local.privacy."))
    )
    marks, numbers = _marks(runs, costs, "epsilon", apart=apart)
    caption = (
        "Test accuracy in the last "
        f"round{', with the standard deviation over seeds,' if runs.several_seeds else ''} against "
        "the ε of the client that spent most, from the ledgers. Each mark is a method at one "
        "setting; marks that differ only in their budget are connected."
        + (" Methods are side by side at each ε." if len(runs.methods) > 1 else "")
    )
    xlabel = "ε of the client that spent most"
    figure = figures.against_values(marks, xlabel=xlabel, names=names)
    return html.picture(figure, "privacy", caption, numbers)


def against_bytes(runs: Runs) -> str:
    """Return accuracy against the bytes of a run, or a note that all sent the same."""
    costs = {
        row["key"]: (row["bytes_up"] + row["bytes_down"]) / 1e6
        for row in runs.rows
        if row["bytes_up"] is not None
    }
    if len(costs) < 2 or min(costs.values()) <= 0:
        return ""
    if (most := max(costs.values())) < 1.02 * min(costs.values()):
        sent = megabytes(1e6 * most)
        return html.note(f"All methods and settings sent the same within 2 %: {sent} MB per run.")
    marks, numbers = _marks(runs, costs, "megabytes")
    caption = (
        "Test accuracy in the last round against the data sent in both directions, including the "
        "preparation. Each mark is a method at one setting; the dotted line joins the results that "
        "no cheaper one beats."
    )
    return html.picture(figures.against_bytes(marks), "bytes", caption, numbers)


def _marks(
    runs: Runs, costs: Mapping[str, float], cost: str, *, apart: tuple[str, ...] = ()
) -> tuple[list[Mark], Table]:
    """Return a mark for every row with a cost, and their numbers.

    Rows whose settings differ only in the keys ``apart`` share a line.
    """
    marks, data = [], []
    for row in (row for row in runs.rows if row["key"] in costs):
        price, (mean, deviation, best) = costs[row["key"]], (row[name] for name in ACCURACIES)
        rest = {key: value for key, value in settings_of(row).items() if key not in apart}
        line = group_key({"method": row["method"]} | rest)
        marks.append(Mark(row["method"], price, mean, deviation, line))
        written = "" if price == NO_EPSILON else f"{price:.6g}"
        if cost in runs.keys:
            written = setting_text(row[cost])
        texts = (f"{number:.6g}" for number in (mean, deviation, best))
        data.append((row["method"], runs.setting(row), written, *texts, row["seeds_done"]))
    headers = ("method", "setting", cost, *ACCURACIES, "seeds")
    return marks, Table(headers, data)
