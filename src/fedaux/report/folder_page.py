"""The page of a folder of runs: one self-contained HTML file that ranks methods and settings, and shows the prices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import tomli_w

from fedaux.files import save_text
from fedaux.recipes import flatten
from fedaux.report import figures, folder_figures, html
from fedaux.report.comparison import Comparison, value_text
from fedaux.report.folder_figures import Mark
from fedaux.report.record import Point, curve_points
from fedaux.report.records import Folder, group_key, read_folder, settings_of
from fedaux.report.svg import as_svg

MOST_PANELS = 8
MOST_LINES = 8
MOST_SETTINGS = 6
MOST_COLUMNS = 8
MOST_MAPS = 4
MOST_ROWS = 12


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a folder of runs and return its path. Raises ValueError naming what is wrong."""
    path = Path(directory) / "report.html"
    save_text(path, render(read_folder(directory)))
    return path


def render(folder: Folder) -> str:
    """The whole page."""
    comparison = Comparison(folder)
    sections = (_ranking, _curves, _settings, _privacy, _bytes, _runs, _configuration)
    body = "\n".join(part for part in (_header(comparison), *(part(comparison) for part in sections)) if part)
    return html.document(f"{folder.name} · fedaux runs", body)


def finding(comparison: Comparison) -> str:
    """What came out, in plain words."""
    rows = comparison.rows
    if not rows:
        return "Nothing has been measured yet."
    best = rows[0]
    at = f" at {comparison.setting(best)}" if comparison.keys else ""
    seeds = "" if best["seeds_done"] == 1 else f" over {best['seeds_done']} seeds"
    top = f"{best['method']}{at} reached {comparison.spread(best)} % in the last round{seeds}, the highest of all"
    if len(comparison.methods) > 1 and len(comparison.settings) > 1 and comparison.ranks:
        leader = comparison.methods[0]
        wins = sum(
            max(found, key=lambda row: row["accuracy_mean"])["method"] == leader
            for setting in comparison.settings
            if (found := [row for row in rows if comparison.setting(row) == setting])
        )
        return (
            f"{leader} is best in {wins} of {len(comparison.settings)} settings (mean rank "
            f"{comparison.ranks[leader]:.2f} of {len(comparison.methods)}). {top}."
        )
    if len(rows) == 1:
        return f"{top.removesuffix(', the highest of all')}."
    worst = rows[-1]
    where = comparison.setting(worst) if len(comparison.methods) == 1 else worst["method"]
    return f"{top}. The lowest, {comparison.spread(worst)} %, was {where}."


def _header(comparison: Comparison) -> str:
    folder = comparison.folder
    seeds = sorted({record["seed"] for record in comparison.records})
    facts = [
        f"{len(folder.runs)} run{'s' if len(folder.runs) != 1 else ''}",
        f"{len(comparison.methods)} method{'s' if len(comparison.methods) != 1 else ''}",
        f"seed{'s' if len(seeds) != 1 else ''} {', '.join(map(str, seeds))}",
        *(
            f"{_named(comparison, key)} {', '.join(map(value_text, values))}"
            for key, values in comparison.values.items()
        ),
        *(
            f"{key} of {method} {', '.join(map(value_text, values))}"
            for key, methods in folder.tuned.items()
            for method, values in methods.items()
        ),
    ]
    missing = []
    if folder.failed:
        names = ", ".join(list(folder.failed)[:3]) + (", ..." if len(folder.failed) > 3 else "")
        missing.append(f"{len(folder.failed)} failed ({names})")
    if unfinished := [name for name in folder.unfinished if name not in folder.failed]:
        missing.append(f"{len(unfinished)} unfinished")
    if folder.waiting:
        missing.append(f"{len(folder.waiting)} not begun")
    notice = ""
    if missing:
        total = len({*folder.runs, *folder.failed, *folder.waiting})
        notice = (
            f'<p class="notice"><strong>Not every run is there.</strong> Of {total}: {escape(", ".join(missing))}. '
            "Numbers of unfinished runs are preliminary.</p>\n"
        )
    line = " · ".join(escape(fact) for fact in facts)
    return (
        f'<header>\n<p class="kind">fedaux runs compared</p>\n<h1>{escape(folder.name)}</h1>\n'
        f'<p class="finding">{escape(finding(comparison))}</p>\n{notice}<p class="facts">{line}</p>\n</header>'
    )


def _ranking(comparison: Comparison) -> str:
    if not comparison.rows:
        return html.section("ranking", "Ranking", html.note("No run has results yet."))
    body = ""
    if len(comparison.methods) > 1 and 1 < len(comparison.settings) <= MOST_COLUMNS:
        body += _by_setting(comparison, "accuracy", "Accuracy in the last round, %")
        body += html.folded(
            "The same for the best round",
            _by_setting(comparison, "accuracy_max", "Maximum accuracy over the rounds, %"),
        )
    header = (
        *("method", *(comparison.short[key] for key in comparison.keys), "last round, %", "best round, %"),
        *("seeds", "ε spent", "δ", "MB up", "MB down", "seconds"),
    )
    lines = [
        (
            *(row["method"], *(value_text(row[key]) for key in comparison.keys)),
            *(comparison.spread(row), comparison.spread(row, "accuracy_max"), row["seeds_done"]),
            *(html.budget(row["epsilon"]), html.short(row["delta"])),
            *(html.megabytes(row["bytes_up"]), html.megabytes(row["bytes_down"]), html.decimal(row["seconds"])),
        )
        for row in comparison.rows
    ]
    over = "mean ± standard deviation over seeds" if comparison.several_seeds else "one seed"
    caption = f"Every method and setting, best last round first ({over})."
    first, rest = (lines, []) if body else (lines[:MOST_ROWS], lines[MOST_ROWS:])
    shown = html.table(header, first, caption=caption, best=0 if len(lines) > 1 else None)
    body += html.folded(f"Every method and setting, with its price ({len(lines)} rows)", shown) if body else shown
    if rest:
        body += html.folded(f"The other {len(rest)}", html.table(header, rest, caption="The same, continued."))
    names = list(dict.fromkeys(key for record in comparison.records for key in record))
    numbers = [[_plain(record.get(name)) for name in names] for record in comparison.records]
    body += html.note(
        "Best round is the maximum over the rounds, which nobody without the test data could have picked. ε and δ are "
        "what the worst client spent; – means that nothing was released through a privacy mechanism. Megabytes (10⁶ "
        "bytes) and seconds are a seed's, with its preparation. Every run, method and seed: "
        + html.download("records", names, numbers),
        raw=True,
    )
    return html.section("ranking", "Ranking", body)


def _by_setting(comparison: Comparison, measure: str, caption: str) -> str:
    """Methods by settings, the best of each column marked."""
    rows, marked = [], set()
    for column, setting in enumerate(comparison.settings, start=1):
        found = [(comparison.find(method, setting) or {}).get(f"{measure}_mean") for method in comparison.methods]
        known = [value for value in found if value is not None]
        marked |= {(row, column) for row, value in enumerate(found) if known and value == max(known)}
    for method in comparison.methods:
        cells = [comparison.find(method, setting) for setting in comparison.settings]
        rank = comparison.ranks.get(method)
        rows.append(
            (
                method,
                *("–" if row is None else comparison.spread(row, measure) for row in cells),
                *(() if measure != "accuracy" else ("–" if rank is None else f"{rank:.2f}",)),
            )
        )
    header = ("method", *(setting.replace(", ", "\n") for setting in comparison.settings))
    ranked = ("mean\nrank",) if measure == "accuracy" else ()
    over = ", mean ± standard deviation over seeds" if comparison.several_seeds else ""
    return html.table(
        (*header, *ranked), rows, caption=f"{caption}{over}; the best of each setting is bold.", marked=marked
    )


def _curves(comparison: Comparison) -> str:
    curves = _curves_by_setting(comparison)
    if not curves:
        return ""
    bands = "mean over seeds, bands from the worst to the best seed" if comparison.several_seeds else "one seed"
    data = [
        (method, setting, *point[:1], *(f"{value:.6g}" for value in point[1:4]), point.seeds)
        for setting, methods in curves.items()
        for method, points in methods.items()
        for point in points
    ]
    header = ("method", "setting", "round", "accuracy_mean", "accuracy_min", "accuracy_max", "seeds")
    if len(comparison.methods) == 1 and len(curves) > 1:
        (method,) = comparison.methods
        best = sorted(curves, key=lambda setting: -curves[setting][method][-1].mean)[:MOST_SETTINGS]
        shown = {setting: curves[setting][method] for setting in comparison.settings if setting in best}
        drawn = len(shown)
        styles = figures.setting_styles(list(shown))
        figure = figures.labelled_lines(shown, xlabel="communication round", styles=styles)
        caption = f"Test accuracy of {method} after each round, a line a setting ({bands})."
        caption += " Those that end highest are drawn." if drawn < len(curves) else ""
    elif len(curves) == 1:
        (shown,) = curves.values()
        drawn = 1
        figure = figures.labelled_lines(shown, xlabel="communication round")
        caption = f"Test accuracy after each round ({bands})."
    else:
        picks = np.linspace(0, len(curves) - 1, min(MOST_PANELS, len(curves))).round().astype(int)
        panels: dict[str, Mapping[str, Sequence[Point]]] = {
            list(curves)[pick]: list(curves.values())[pick] for pick in picks
        }
        figure = folder_figures.curve_panels(list(panels.items()))
        drawn = len(panels)
        caption = f"Test accuracy after each round, a panel a setting ({bands})."
    if drawn < len(curves):
        caption += f" These are {drawn} of {len(curves)} settings; the numbers are of all."
    svg = as_svg(figure, prefix="curves", label=caption)
    return html.section("curves", "Learning curves", html.picture(svg, caption, "curves", header, data))


def _curves_by_setting(comparison: Comparison) -> dict[str, dict[str, list[Point]]]:
    """Curves of each method at each setting, over the seeds of all runs that have it."""
    rounds: dict[str, list[Mapping[str, Any]]] = {}
    for name, run in comparison.folder.runs.items():
        rounds.setdefault(comparison.setting(comparison.folder.settings[name]), []).extend(run.metrics)
    found = {setting: curve_points(rounds.get(setting, [])) for setting in comparison.settings}
    return {
        setting: {method: curves[method] for method in comparison.methods if method in curves}
        for setting, curves in found.items()
        if curves
    }


def _settings(comparison: Comparison) -> str:
    """What the swept keys do: a heat map for the two that matter most, a line for one."""
    wide = [key for key in comparison.keys if len(comparison.values[key]) > 1]
    if not wide:
        return ""
    if len(wide) == 1:  # the budget has a figure of its own
        return "" if wide == ["certainty.epsilon"] and _privacy(comparison) else _one_key(comparison, wide[0])
    row_key, column_key = sorted(sorted(wide, key=lambda key: -_effect(comparison, key))[:2], key=wide.index)
    if len(comparison.values[row_key]) > len(comparison.values[column_key]):
        row_key, column_key = column_key, row_key
    rows, columns = comparison.values[row_key], comparison.values[column_key]
    panels, data = [], []
    for method in comparison.methods:
        panel = np.full((len(rows), len(columns)), math.nan)
        for i, one in enumerate(rows):
            for j, other in enumerate(columns):
                means = [
                    row["accuracy_mean"]
                    for row in comparison.rows
                    if row["method"] == method and (row[row_key], row[column_key]) == (one, other)
                ]
                if means:
                    panel[i, j] = sum(means) / len(means)
                    data.append((method, value_text(one), value_text(other), f"{panel[i, j]:.6g}", len(means)))
        panels.append((method, panel))
    labels = comparison.short[row_key], comparison.short[column_key]
    figure = folder_figures.heat_maps(
        panels[:MOST_MAPS], rows=list(map(value_text, rows)), columns=list(map(value_text, columns)), labels=labels
    )
    caption = f"Test accuracy in the last round, %, over {labels[0]} and {labels[1]}; the best of each method is bold."
    if others := [comparison.short[key] for key in wide if key not in (row_key, column_key)]:
        caption += f" These two matter most; each number is a mean over {' and '.join(others)}."
    if len(panels) > MOST_MAPS:
        caption += f" The {MOST_MAPS} methods of the best mean rank are drawn; the numbers are of all."
    svg = as_svg(figure, prefix="settings", label=caption)
    header = ("method", row_key, column_key, "accuracy", "settings")
    title = f"What {labels[0]} and {labels[1]} do"
    return html.section("settings", title, html.picture(svg, caption, "settings", header, data))


def _one_key(comparison: Comparison, key: str) -> str:
    values, name = comparison.values[key], comparison.short[key]
    curves: dict[str, list[Point]] = {}
    for method in comparison.methods[:MOST_LINES]:
        for place, value in enumerate(values):
            seeds = [
                record["accuracy"]
                for record in comparison.records
                if record["method"] == method and record[key] == value and record["accuracy"] is not None
            ]
            if seeds:
                point = Point(place, sum(seeds) / len(seeds), min(seeds), max(seeds), len(seeds))
                curves.setdefault(method, []).append(point)
    ticks = {place: value_text(value) for place, value in enumerate(values)}
    caption = f"Test accuracy in the last round against {name}" + (
        ", mean over seeds; the band reaches from the worst to the best seed." if comparison.several_seeds else "."
    )
    svg = as_svg(figures.labelled_lines(curves, xlabel=name, ticks=ticks), prefix="settings", label=caption)
    header = ("method", key, "accuracy_mean", "accuracy_min", "accuracy_max", "seeds")
    data = [
        (method, ticks[point.round], *(f"{value:.6g}" for value in point[1:4]), point.seeds)
        for method, points in curves.items()
        for point in points
    ]
    return html.section("settings", f"What {name} does", html.picture(svg, caption, "settings", header, data))


def _effect(comparison: Comparison, key: str) -> float:
    """How far the mean accuracies of a key's values lie apart."""
    means: list[float] = []
    for value in comparison.values[key]:
        found = [row["accuracy_mean"] for row in comparison.rows if row[key] == value]
        means.append(sum(found) / len(found))
    return max(means) - min(means)


def _privacy(comparison: Comparison) -> str:
    costs = {row["key"]: math.nan if row["epsilon"] is None else row["epsilon"] for row in comparison.rows}
    if len({html.short(cost) for cost in costs.values()}) < 2:
        return ""
    marks, settings, header, data = _marks(comparison, costs, "epsilon", apart=("certainty.epsilon", "local.privacy."))
    spread = ", with the standard deviation over seeds" if comparison.several_seeds else ""
    caption = (
        f"Test accuracy in the last round{spread} against the ε of the client that spent most, from the ledgers. "
        f"Points that differ in their budget alone are joined.{_told_apart(settings)}"
        + (" Methods stand side by side at each ε." if len(comparison.methods) > 1 else "")
        + " What the ε covers, and what is not protected, says the page of each run."
    )
    svg = as_svg(folder_figures.against_privacy(marks, settings=settings), prefix="privacy", label=caption)
    return html.section("privacy", "Accuracy against privacy", html.picture(svg, caption, "privacy", header, data))


def _bytes(comparison: Comparison) -> str:
    costs = {
        row["key"]: (row["bytes_up"] + row["bytes_down"]) / 1e6
        for row in comparison.rows
        if row["bytes_up"] is not None
    }
    if not costs or min(costs.values()) <= 0:
        return ""
    if max(costs.values()) < 1.02 * min(costs.values()):
        text = (
            f"All methods and settings sent the same within 2 %: {html.megabytes(1e6 * max(costs.values()))} MB a run."
        )
        return html.section("bytes", "Accuracy against bytes", html.note(text)) if len(costs) > 1 else ""
    marks, settings, header, data = _marks(comparison, costs, "megabytes")
    caption = (
        "Test accuracy in the last round against what was sent in both directions, preparation included. The stairs "
        f"join what is not beaten by anything that sent less.{_told_apart(settings)}"
    )
    svg = as_svg(folder_figures.against_bytes(marks, settings=settings), prefix="bytes", label=caption)
    return html.section("bytes", "Accuracy against bytes", html.picture(svg, caption, "bytes", header, data))


def _told_apart(settings: Sequence[str]) -> str:
    """Say how the settings of marks can be told apart, where there are several."""
    if len(settings) < 2:
        return ""
    if folder_figures.mark_sizes(settings):
        return " The size of a mark tells the setting."
    return f" All {len(settings)} settings have one look here; the numbers tell them apart."


def _marks(
    comparison: Comparison, costs: Mapping[str, float], cost: str, *, apart: tuple[str, ...] = ()
) -> tuple[list[Mark], list[str], tuple[str, ...], list[tuple[object, ...]]]:
    """Every row with a cost as a mark, the settings of the marks in order, and every row as a line of numbers; those
    whose settings differ in ``apart`` alone are of one line."""
    marks, data = [], []
    places: dict[str, tuple[int, ...]] = {}
    for row in comparison.rows:
        if row["key"] in costs:
            other = {key: value for key, value in settings_of(row).items() if not key.startswith(apart or ("\0",))}
            line = group_key({"method": row["method"]} | other)
            price = costs[row["key"]]
            shown = [key for key in comparison.keys if key in other]
            setting = ", ".join(f"{comparison.short[key]} = {value_text(row[key])}" for key in shown)
            texts = {key: list(map(value_text, comparison.values[key])) for key in shown}
            places[setting] = tuple(texts[key].index(value_text(row[key])) for key in shown)
            marks.append(Mark(row["method"], price, row["accuracy_mean"], row["accuracy_std"], line, setting))
            written = "" if math.isnan(price) else f"{price:.6g}"
            figures_ = (f"{row[name]:.6g}" for name in ("accuracy_mean", "accuracy_std", "accuracy_max_mean"))
            data.append((row["method"], comparison.setting(row), written, *figures_, row["seeds_done"]))
    header = ("method", "setting", cost, "accuracy_mean", "accuracy_std", "accuracy_max_mean", "seeds")
    return marks, sorted(places, key=places.__getitem__), header, data


def _runs(comparison: Comparison) -> str:
    folder = comparison.folder
    rows: list[tuple[object, ...]] = []
    links = {}
    for name in dict.fromkeys([*folder.runs, *folder.failed, *folder.waiting]):
        run = folder.runs.get(name)
        state = "not begun" if run is None else "finished" if run.complete else "unfinished"
        if name in folder.failed:
            state = f"failed: {folder.failed[name]}"
        if run is not None:
            links[len(rows)] = f"{quote(name)}/report.html"
        rows.append((name, state, run.environment.get("device", "–") if run is not None else "–"))
    table = html.table(
        ("run", "state", "device"), rows, caption="The runs, each with a page of its own.", texts=(1, 2), links=links
    )
    return html.section(
        "runs", "Runs", table if len(rows) <= MOST_ROWS else html.folded(f"All {len(rows)} runs", table)
    )


def _configuration(comparison: Comparison) -> str:
    tables = [flatten(run.config) for run in comparison.folder.runs.values()]
    if not tables:
        return ""
    common = {
        key: value
        for key, value in tables[0].items()
        if not key.startswith("output.") and all(_plain(table.get(key)) == _plain(value) for table in tables)
    }
    text = escape(tomli_w.dumps(common))
    body = f"<details>\n<summary>What all runs have in common</summary>\n<pre>{text}</pre>\n</details>\n"
    return html.section("configuration", "Configuration", body)


def _named(comparison: Comparison, key: str) -> str:
    """A symbol with the key it stands for, or the key."""
    short = comparison.short[key]
    return short if short in key else f"{short} ({key})"


def _plain(value: Any) -> Any:
    """A value as a CSV file can hold it."""
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)
