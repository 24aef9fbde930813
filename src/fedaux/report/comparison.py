"""The figures that compare runs: the effect of settings, accuracy against privacy and against bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from fedaux.formatting import as_number, megabytes, setting_text, short
from fedaux.report import figures, html
from fedaux.report.figures import Mark
from fedaux.report.results import Runs, group_key, settings_of

MOST_MAPS = 4
NOTHING = -1.0  # the epsilon of methods that release nothing through a privacy mechanism


def effect_of_settings(runs: Runs) -> str:
    """Return the section on the swept keys: heat maps for the two with the largest effect, lines for one."""
    wide = [key for key in runs.keys if len(runs.values[key]) > 1]
    if not wide or (
        wide == ["certainty.epsilon"] and against_privacy(runs)
    ):  # the budget has a figure of its own
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
    caption = f"Test accuracy in the last round, %, over {labels[0]} and {labels[1]}; the best of each method is bold."
    if others := [runs.short[key] for key in wide if key not in (row_key, column_key)]:
        caption += f" These two have the largest effect; each number is a mean over {' and '.join(others)}."
    if len(panels) > MOST_MAPS:
        caption += f" The {MOST_MAPS} methods with the best mean rank are drawn; the saved numbers include all."
    data = [(*place, f"{mean:.6g}", len(found[place])) for place, mean in means.items()]
    headers = ("method", row_key, column_key, "accuracy", "settings")
    title = f"Effect of {labels[0]} and {labels[1]}"
    return html.section(
        "settings", title, html.picture_of(figure, "settings", caption, headers, data)
    )


def _one_key(runs: Runs, key: str) -> str:
    texts, name = list(map(setting_text, runs.values[key])), runs.short[key]
    costs = {row["key"]: float(texts.index(setting_text(row[key]))) for row in runs.rows}
    marks, settings, headers, data = _marks(runs, costs, key, apart=(key,))
    figure = figures.against_values(
        marks, xlabel=name, names=dict(enumerate(texts)), settings=settings
    )
    deviation = ", mean and standard deviation over seeds," if runs.several_seeds else ""
    caption = f"Test accuracy in the last round{deviation} against {name}."
    return html.section(
        "settings", f"Effect of {name}", html.picture_of(figure, "settings", caption, headers, data)
    )


def _effect(runs: Runs, key: str) -> float:
    """Return how far the mean accuracies of a key's values lie apart."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in runs.rows:
        found[setting_text(row[key])].append(row["accuracy_mean"])
    means = [sum(values) / len(values) for values in found.values()]
    return max(means) - min(means)


def against_privacy(runs: Runs) -> str:
    """Return accuracy against epsilon, if there are several runs and budgets."""
    costs = {row["key"]: as_number(row["epsilon"], missing=NOTHING) for row in runs.rows}
    names = {
        cost: "nothing\nreleased" if cost == NOTHING else short(cost)
        for cost in sorted(set(costs.values()))
    }
    if runs.only or len(set(names.values())) < 2:
        return ""
    apart = tuple(
        key for key in runs.keys if key.startswith(("certainty.epsilon", "local.privacy."))
    )
    marks, settings, headers, data = _marks(runs, costs, "epsilon", apart=apart)
    caption = (
        f"Test accuracy in the last round{', with the standard deviation over seeds,' if runs.several_seeds else ''} "
        "against the ε of the client that spent most, from the ledgers. Points that differ only in their budget are "
        f"joined.{_told_apart(settings)}"
        + (" Methods stand side by side at each ε." if len(runs.methods) > 1 else "")
    )
    xlabel = "ε of the client that spent most"
    figure = figures.against_values(marks, xlabel=xlabel, names=names, settings=settings)
    return html.picture_of(figure, "privacy", caption, headers, data)


def against_bytes(runs: Runs) -> str:
    """Return accuracy against the bytes of a run, or that all sent the same."""
    costs = {
        row["key"]: (row["bytes_up"] + row["bytes_down"]) / 1e6
        for row in runs.rows
        if row["bytes_up"] is not None
    }
    if len(costs) < 2 or min(costs.values()) <= 0:
        return ""
    if (most := max(costs.values())) < 1.02 * min(costs.values()):
        same = f"All methods and settings sent the same amount within 2 %: {megabytes(1e6 * most)} MB per run."
        return html.note(same)
    marks, settings, headers, data = _marks(runs, costs, "megabytes")
    caption = (
        "Test accuracy in the last round against the data sent in both directions, including the preparation. The "
        f"dotted line joins the results that nothing cheaper beats.{_told_apart(settings)}"
    )
    return html.picture_of(
        figures.against_bytes(marks, settings=settings), "bytes", caption, headers, data
    )


def _told_apart(settings: Sequence[str]) -> str:
    if len(settings) < 2:
        return ""
    if figures.mark_sizes(settings):
        return " The size of a mark stands for the setting."
    return f" All {len(settings)} settings look the same here; the saved numbers tell them apart."


def _marks(
    runs: Runs, costs: Mapping[str, float], cost: str, *, apart: tuple[str, ...] = ()
) -> tuple[list[Mark], list[str], tuple[str, ...], list[tuple[object, ...]]]:
    """Return every row with a cost as a mark, the settings of the marks in order, and their numbers.

    Rows whose settings differ in the keys ``apart`` alone are of one line.
    """
    rows = [row for row in runs.rows if row["key"] in costs]
    shown = [key for key in runs.keys if key not in apart]
    marks, data = [], []
    for row in rows:
        price, numbers = (
            costs[row["key"]],
            (row["accuracy_mean"], row["accuracy_std"], row["accuracy_max_mean"]),
        )
        rest = {key: value for key, value in settings_of(row).items() if key in shown}
        line = group_key({"method": row["method"]} | rest)
        marks.append(Mark(row["method"], price, *numbers[:2], line, runs.setting(row, shown)))
        written = (
            setting_text(row[cost])
            if cost in runs.keys
            else ""
            if price == NOTHING
            else f"{price:.6g}"
        )
        texts = (f"{number:.6g}" for number in numbers)
        data.append((row["method"], runs.setting(row), written, *texts, row["seeds_done"]))
    headers = (
        "method",
        "setting",
        cost,
        "accuracy_mean",
        "accuracy_std",
        "accuracy_max_mean",
        "seeds",
    )
    return marks, runs.settings_in_order(shown, rows), headers, data
