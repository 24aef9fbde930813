"""The page about one run or many: a self-contained HTML file with results, costs and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html import escape
from typing import Any
from urllib.parse import quote

import numpy as np
import tomli_w

from fedaux.formatting import as_number, mean_and_deviation, plural, privacy_budget, setting_text
from fedaux.recipes import flatten
from fedaux.report import figures, html
from fedaux.report.comparison import effect_of_settings
from fedaux.report.results import (
    LEVEL,
    Runs,
    group,
    is_bound,
    ranked,
    results_table,
    spread,
)
from fedaux.report.run import Run
from fedaux.report.sections import (
    classes_section,
    communication_section,
    privacy_section,
    prototype_table,
    scores_section,
    split_section,
    time_section,
)
from fedaux.report.tables import Table, to_html
from fedaux.report.verdict import verdict
from fedaux.report.warnings import all_warnings

MOST_PANELS = MOST_COLUMNS = 8
MOST_SETTINGS, MOST_ROWS = 6, 12
RESULTS = (
    *(
        "method",
        "accuracy_mean",
        "accuracy_std",
        "accuracy_max_mean",
        "accuracy_max_std",
        "seeds_done",
    ),
    *("epsilon", "delta", "seconds", "bytes_up", "bytes_down"),
)
LEVEL_NOTE = f" {LEVEL.strip()}: level with the best, within one standard error."
CURVE = ("accuracy_mean", "accuracy_min", "accuracy_max", "seeds")


def render(runs: Runs) -> str:
    """Return the whole page; empty sections are left out."""
    sections = (
        *(_header, _results, _curves, effect_of_settings, classes_section, split_section),
        *(
            scores_section,
            privacy_section,
            communication_section,
            time_section,
            _runs,
            _configuration,
        ),
    )
    body = "\n".join(part for section in sections if (part := section(runs)))
    return html.document(f"{runs.name} · fedaux run{'' if runs.only else 's'}", body)


def finding(runs: Runs) -> str:
    """Return the main result in one or two sentences."""
    if not runs.rows:
        return "Nothing has been evaluated yet."
    if not runs.keys:
        return _finding_at_one_setting(runs)
    rows = [row for row in runs.rows if not is_bound(row["method"])] or runs.rows
    best, worst, settings = rows[0], rows[-1], runs.settings_in_order()
    seeds = f" (mean over {best['seeds_done']} seeds)" if best["seeds_done"] > 1 else ""
    top = f"{best['method']} at {runs.setting(best)} reached {spread(best)} % "
    top += f"in the last round{seeds}"
    if len(rows) == 1:
        return f"{top}."
    if len(settings) > 1 and runs.ranks and len(runs.methods) > 1:
        leader = next((name for name in runs.methods if not is_bound(name)), runs.methods[0])
        winners = {
            runs.setting(row): row["method"]
            for row in reversed(runs.rows)
            if not is_bound(row["method"])
        }  # the best comes last
        wins = sum(winner == leader for winner in winners.values())
        rank = f"mean rank {runs.ranks[leader]:.2f} of {len(runs.methods)}"
        return (
            f"{leader} is best in {wins} of {len(settings)} settings ({rank}). The highest: {top}."
        )
    return f"{top}. The lowest, {spread(worst)} %, was {worst['method']} at {runs.setting(worst)}."


def _finding_at_one_setting(runs: Runs) -> str:
    rows = [row for row in runs.rows if not is_bound(row["method"])] or runs.rows
    best, level = rows[0], [row["method"] for row in rows if row["key"] in runs.level]
    reached = f"{best['method']} reached {mean_and_deviation(best['accuracy_mean'])} % in"
    complete = all(run.complete for run in runs.runs.values())
    text = f"{reached} the last round" if complete else f"So far {reached} its last recorded round"
    if level:
        text += f", level with {' and '.join(level)}"
    if below := rows[1 + len(level) :]:
        points = 100 * (best["accuracy_mean"] - below[0]["accuracy_mean"])
        which = "next" if level or len(below) > 1 else "only other"
        text += f", {points:.1f} points above {below[0]['method']}, the {which} method"
    if best["epsilon"] is None:
        return f"{text}."
    what = "All that a client sent is" if runs.updates_protected else "The clients' releases are"
    if math.isinf(best["epsilon"]):
        return f"{text}. {what} not differentially private."
    return (
        f"{text}. {what} {privacy_budget(best['epsilon'], best['delta'])}-differentially private."
    )


def _header(runs: Runs) -> str:
    same, seeds = _common(runs), sorted({record["seed"] for record in runs.records})
    if runs.only:
        seeds = runs.only.summary.get("seeds") or runs.only.config.get("seeds", [])
    rate = as_number(same.get("participation_rate"))
    facts = [
        None if runs.only else plural(len(runs.runs), "run"),
        None if runs.only else plural(len(runs.methods), "method"),
        _fact("{} data", same.get("data.source")),
        _fact("{} as auxiliary data", same.get("auxiliary.source")),
        _fact("{} clients", same.get("split.num_clients")),
        None if same.get("data.clients") else _fact("α = {}", same.get("split.alpha")),
        None if math.isnan(rate) else f"{100 * rate:.4g} % of the clients per round",
        _fact("{} rounds", same.get("rounds")),
        _fact("seed {}" if len(seeds) == 1 else "seeds {}", ", ".join(map(str, seeds)) or None),
    ]
    for key, values in runs.values.items():
        name = runs.short[key]
        facts.append(
            f"{name if name in key else f'{name} ({key})'}: {', '.join(map(setting_text, values))}"
        )
    for key, methods in runs.tuned.items():
        facts += [
            f"{key} of {name}: {', '.join(map(setting_text, values))}"
            for name, values in methods.items()
        ]
    kind = "fedaux run" if runs.only else "fedaux runs compared"
    return (
        f'<header>\n<p class="kind">{kind}</p>\n<h1>{escape(runs.name)}</h1>\n'
        f'<p class="finding">{escape(finding(runs))}</p>\n{_verdict(runs)}'
        f"{_warned(runs)}{_notice(runs)}"
        f'<p class="facts">{" · ".join(escape(fact) for fact in facts if fact)}</p>\n</header>'
    )


def _verdict(runs: Runs) -> str:
    """Return the differences between methods at one setting."""
    if runs.keys:
        return ""
    accuracies: dict[str, dict[int, float]] = {}
    for record in runs.records:
        if record["accuracy"] is not None:
            accuracies.setdefault(record["method"], {})[record["seed"]] = record["accuracy"]
    table = verdict(accuracies, test_examples=runs.test_examples)
    return "" if table is None else html.table(table, name="verdict")


def _warned(runs: Runs) -> str:
    return "".join(
        f'<p class="notice"><strong>Warning:</strong> {escape(line.rstrip("."))}.</p>\n'
        for line in all_warnings(runs)
    )


def _fact(pattern: str, value: object) -> str | None:
    return None if value is None else pattern.format(value)


def _notice(runs: Runs) -> str:
    """Return a notice about missing runs or rounds, if any."""
    unfinished = [
        name for name, run in runs.runs.items() if not run.complete and name not in runs.failed
    ]
    failed = ", ".join(list(runs.failed)[:3]) + (", ..." if len(runs.failed) > 3 else "")
    missing = [
        *([f"{len(runs.failed)} failed ({failed})"] if runs.failed else []),
        *([f"{len(unfinished)} unfinished"] if unfinished else []),
        *([f"{len(runs.waiting)} not started"] if runs.waiting else []),
    ]
    if not missing:
        return ""
    title = "This run is not finished." if runs.only else "Some runs are missing or not finished."
    text = (
        _missing_rounds(runs.only)
        if runs.only
        else f"Of {len(runs.planned)}: {', '.join(missing)}."
    )
    text = f"{escape(text)} The numbers below are preliminary."
    return f'<p class="notice"><strong>{title}</strong> {text}</p>\n'


def _missing_rounds(run: Run) -> str:
    behind = {method: counts for method, counts in run.progress.items() if counts[0] < counts[1]}
    if not behind:
        return "Every round is recorded, but the summary is missing or not final."
    if len(behind) > 1 and len(set(behind.values())) == 1:
        done, planned = next(iter(behind.values()))
        return (
            f"Rounds recorded over all seeds: {done} of {planned} for each of {', '.join(behind)}."
        )
    rounds = ", ".join(
        f"{method} {done} of {planned}" for method, (done, planned) in behind.items()
    )
    return f"Rounds recorded over all seeds: {rounds}."


def _results(runs: Runs) -> str:
    rows, body = ranked(group(runs.records)), ""
    if not rows:
        return html.section("results", "Results", html.note("There are no results yet."))
    if len(runs.methods) > 1 and 1 < len(runs.settings_in_order()) <= MOST_COLUMNS:
        body += html.table(_by_setting(runs, "accuracy", "Test accuracy in the last round, %"))
        best = _by_setting(runs, "accuracy_max", "Highest test accuracy over the rounds, %")
        body += html.folded("The same for the best round", html.table(best))
    over = "mean ± standard deviation over seeds" if runs.several_seeds else "one seed"
    each = "each method and setting" if runs.keys else "each method"
    caption = f"Test accuracy in % ({over}) and cost of {each}, best last round first."
    first, rest = (rows, []) if body else (rows[:MOST_ROWS], rows[MOST_ROWS:])
    caption += LEVEL_NOTE if runs.level else ""
    table = html.table(results_table(first, names=runs.short, caption=caption, level=runs.level))
    body += html.folded(f"Accuracy and cost of {each} ({len(rows)} rows)", table) if body else table
    if rest:
        more = results_table(
            rest, names=runs.short, caption="Continued.", best=False, level=runs.level
        )
        body += html.folded(f"The other {len(rest)} rows", html.table(more))
    covered = (
        "everything that the client sent" if runs.updates_protected else "what the client released"
    )
    fields = list(dict.fromkeys(key for record in runs.records for key in record))
    headers = (RESULTS[0], *runs.keys, *RESULTS[1:])
    means = [[_plain(row[name]) for name in headers] for row in rows]
    records = [[_plain(record.get(name)) for name in fields] for record in runs.records]
    every = html.download(
        "records", Table(fields, records), text="Save every run, method and seed (CSV)"
    )
    if any(is_bound(row["method"]) for row in rows):
        body += html.note(
            "local-only and pooled are bounds, not rivals: the mean accuracy of clients that each "
            "train alone, and one model trained on all data in one place. All train in every round."
        )
    body += html.note(
        "The best round is the maximum over the rounds. Choosing it takes the test data, so the "
        f"last round is the fair number. (ε, δ) is the cost of {covered}, for the client that "
        "spent most; – means that nothing was released through a privacy mechanism. Megabytes "
        "(10⁶ bytes) and seconds are for one seed, including its preparation; the seconds are "
        "without h0 and features, which methods share. "
        f"{html.download('results', Table(headers, means))} {every}",
        raw=True,
    )
    return html.section("results", "Results", body + prototype_table(runs.only))


def _by_setting(runs: Runs, measure: str, caption: str) -> Table:
    """Return methods by settings, the best of each column in bold."""
    settings, ranked_ = runs.settings_in_order(), measure == "accuracy"
    grid = [[runs.find(method, setting) for setting in settings] for method in runs.methods]
    bold = set()
    for column in range(len(settings)):
        means = [
            -math.inf
            if (row := line[column]) is None or is_bound(row["method"])
            else row[f"{measure}_mean"]
            for line in grid
        ]
        bold |= {
            (number, column + 1)
            for number, mean in enumerate(means)
            if mean == max(means) > -math.inf
        }

    def mark(row: Mapping[str, Any]) -> str:
        return LEVEL if ranked_ and row["key"] in runs.level else ""

    rows = [
        (
            *(method, *("–" if row is None else spread(row, measure) + mark(row) for row in line)),
            *([f"{runs.ranks[method]:.2f}" if method in runs.ranks else "–"] if ranked_ else []),
        )
        for method, line in zip(runs.methods, grid, strict=True)
    ]
    headers = (
        "method",
        *(setting.replace(", ", "\n") for setting in settings),
        *(["mean\nrank"] if ranked_ else []),
    )
    over = ", mean ± standard deviation over seeds" if runs.several_seeds else ""
    caption += f"{over}; the best of each setting is bold."
    caption += LEVEL_NOTE if ranked_ and runs.level else ""
    return Table(headers, rows, caption=caption, bold=bold)


def _curves(runs: Runs) -> str:
    curves, title = runs.curves(), "Learning curves"
    if not curves:
        return html.section("curves", title, html.note("No round has been evaluated yet."))
    counts = {
        point.seeds
        for methods in curves.values()
        for points in methods.values()
        for point in points
    }
    bands = (
        "mean over seeds; the band spans the lowest and the highest seed"
        if counts != {1}
        else "one seed"
    )
    bands += "; unfinished seeds count with their finished rounds" if len(counts) > 1 else ""
    drawn = len(curves)
    if len(curves) == 1:
        figure = figures.labelled_lines(next(iter(curves.values())))
        caption = f"Test accuracy of the server's model after each round ({bands})."
    elif len(runs.methods) == 1:
        (method,) = runs.methods
        best = sorted(curves, key=lambda setting: -curves[setting][method][-1].mean)[:MOST_SETTINGS]
        shown = {setting: curves[setting][method] for setting in curves if setting in best}
        styles = figures.setting_styles(list(shown))
        figure = figures.labelled_lines(shown, styles=styles)
        caption = f"Test accuracy of {method} after each round, one line per setting ({bands})."
        drawn = len(shown)
    else:
        picks = np.linspace(0, len(curves) - 1, min(MOST_PANELS, len(curves))).round().astype(int)
        figure = figures.curve_panels([list(curves.items())[pick] for pick in picks])
        caption = f"Test accuracy after each round, one panel per setting ({bands})."
        drawn = len(picks)
    if drawn < len(curves):
        which = "The best " if len(runs.methods) == 1 else ""
        caption += (
            f" {which}{drawn} of {len(curves)} settings are drawn; the saved numbers include all."
        )
    data = [
        (
            *(method, *([setting] if runs.keys else []), point.round),
            *(f"{value:.6g}" for value in (point.mean, point.low, point.high)),
            point.seeds,
        )
        for setting, methods in curves.items()
        for method, points in methods.items()
        for point in points
    ]
    headers = ("method", *(["setting"] if runs.keys else []), "round", *CURVE)
    ends = "; ".join(
        f"{name} {mean_and_deviation(p[-1].mean)} %"
        for name, p in next(iter(curves.values())).items()
    )
    label = f"{caption} At the end: {ends}." if len(curves) == 1 else caption
    return html.section(
        "curves", title, html.picture(figure, "curves", caption, Table(headers, data), label=label)
    )


def _runs(runs: Runs) -> str:
    if not runs.folder:
        return ""
    rows, links = [], {}
    for number, name in enumerate(runs.planned):
        run = runs.runs.get(name)
        state = "not started" if run is None else "finished" if run.complete else "unfinished"
        if name in runs.failed:
            state = f"failed: {runs.failed[name]}"
        if run is not None:
            links[number] = f"{quote(name)}/report.html"
        rows.append((name, state, run.environment.get("device", "–") if run is not None else "–"))
    table = html.table(
        Table(
            ("run", "state", "device"), rows, "lll", "Each run has a page of its own.", links=links
        )
    )
    return html.section(
        "runs",
        "Runs",
        table if len(rows) <= MOST_ROWS else html.folded(f"All {len(rows)} runs", table),
    )


def _configuration(runs: Runs) -> str:
    if not runs.runs:
        return ""
    if runs.only is None:
        settings = {
            key: value for key, value in _common(runs).items() if not key.startswith("output.")
        }
        text, title, versions = tomli_w.dumps(settings), "Settings that all runs share", ""
    else:
        text, title, rows = (
            runs.only.config_text,
            "Resolved configuration",
            list(runs.only.environment.items()),
        )
        if digest := runs.only.summary.get("config_sha256"):
            rows.append(("config SHA-256", digest))
        versions = to_html(Table(("", ""), rows, "ll", "Versions and machine."))
    return html.section(
        "configuration",
        "Configuration",
        html.folded(title, f"<pre>{escape(text)}</pre>") + versions,
    )


def _common(runs: Runs) -> dict[str, Any]:
    """Return the settings that all runs share."""
    first, *others = [flatten(run.config) for run in runs.runs.values()] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(_plain(o.get(key)) == _plain(value) for o in others)
    }


def _plain(value: Any) -> Any:
    """Return a value for a CSV file."""
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)
