"""The page about one run or many: one self-contained HTML file with results, their cost and their origin."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

import numpy as np
import tomli_w

from fedaux.formatting import (
    as_number,
    interval,
    mean_and_deviation,
    megabytes,
    over_seeds,
    plural,
    privacy_budget,
    setting_text,
    short,
)
from fedaux.recipes import flatten
from fedaux.report import figures, html
from fedaux.report.comparison import against_bytes, against_privacy, effect_of_settings
from fedaux.report.results import Runs, group, ranked, results_table, spread
from fedaux.report.run import Array, Point, Record, Row, Run, Scores
from fedaux.report.tables import Table, to_html

MOST_PANELS = MOST_COLUMNS = 8
MOST_SETTINGS, MOST_ROWS, TOP_TEXTS = 6, 12, 3
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
CURVE = ("accuracy_mean", "accuracy_min", "accuracy_max", "seeds")


def render(runs: Runs) -> str:
    """Return the whole page; a section that has nothing to show is left out."""
    sections = (
        *(_header, _results, _curves, effect_of_settings, _split, _scores),
        *(_privacy, _communication, _time, _runs, _configuration),
    )
    body = "\n".join(part for section in sections if (part := section(runs)))
    return html.document(f"{runs.name} · fedaux run{'' if runs.only else 's'}", body)


def finding(runs: Runs) -> str:
    """Return the main result in one or two sentences."""
    if not runs.rows:
        return "Nothing has been evaluated yet."
    if not runs.keys:
        return _finding_at_one_setting(runs)
    best, worst, settings = runs.rows[0], runs.rows[-1], runs.settings_in_order()
    seeds = f" (mean over {best['seeds_done']} seeds)" if best["seeds_done"] > 1 else ""
    top = f"{best['method']} at {runs.setting(best)} reached {spread(best)} % in the last round{seeds}"
    if len(runs.rows) == 1:
        return f"{top}."
    if len(settings) > 1 and runs.ranks and len(runs.methods) > 1:
        leader = runs.methods[0]
        winners = {
            runs.setting(row): row["method"] for row in reversed(runs.rows)
        }  # the best comes last, and stays
        wins = sum(winner == leader for winner in winners.values())
        rank = f"mean rank {runs.ranks[leader]:.2f} of {len(runs.methods)}"
        return (
            f"{leader} is best in {wins} of {len(settings)} settings ({rank}). The highest: {top}."
        )
    return f"{top}. The lowest, {spread(worst)} %, was {worst['method']} at {runs.setting(worst)}."


def _finding_at_one_setting(runs: Runs) -> str:
    hero = next((row for row in runs.rows if row["method"] == "fedaux"), runs.rows[0])
    rivals = [row for row in runs.rows if row is not hero]
    reached = f"{hero['method']} reached {mean_and_deviation(hero['accuracy_mean'])} % in"
    complete = all(run.complete for run in runs.runs.values())
    text = f"{reached} the last round" if complete else f"So far {reached} its last recorded round"
    if rivals:
        rival, others = (
            rivals[0],
            "the best other method" if len(rivals) > 1 else "the only other method",
        )
        points = 100 * (hero["accuracy_mean"] - rival["accuracy_mean"])
        ahead = f"{abs(points):.1f} points {'above' if points > 0 else 'below'}"
        text += f", {'level with' if abs(points) < 0.05 else ahead} {rival['method']}, {others}"
        deviation = 100 * max(row["accuracy_std"] for row in (hero, rival))
        if hero["seeds_done"] > 1 and 0.05 <= abs(points) <= deviation:
            text += " (less than one standard deviation over seeds)"
    if hero["epsilon"] is None:
        return f"{text}."
    what = "All that a client sent is" if _protected(runs) else "The certainty scores are"
    if math.isinf(hero["epsilon"]):
        return f"{text}. {what} not differentially private."
    return (
        f"{text}. {what} {privacy_budget(hero['epsilon'], hero['delta'])}-differentially private."
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
        f'<p class="finding">{escape(finding(runs))}</p>\n{_notice(runs)}'
        f'<p class="facts">{" · ".join(escape(fact) for fact in facts if fact)}</p>\n</header>'
    )


def _fact(pattern: str, value: object) -> str | None:
    return None if value is None else pattern.format(value)


def _notice(runs: Runs) -> str:
    """Return what is missing, if anything is."""
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
    return f'<p class="notice"><strong>{title}</strong> {escape(text)} The numbers below are preliminary.</p>\n'


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
        body += to_html(_by_setting(runs, "accuracy", "Test accuracy in the last round, %"))
        best = _by_setting(runs, "accuracy_max", "Highest test accuracy over the rounds, %")
        body += html.folded("The same for the best round", to_html(best))
    over = "mean ± standard deviation over seeds" if runs.several_seeds else "one seed"
    each = "each method and setting" if runs.keys else "each method"
    caption = f"Test accuracy in % ({over}) and cost of {each}, best last round first."
    first, rest = (rows, []) if body else (rows[:MOST_ROWS], rows[MOST_ROWS:])
    table = to_html(results_table(first, names=runs.short, caption=caption))
    body += html.folded(f"Accuracy and cost of {each} ({len(rows)} rows)", table) if body else table
    if rest:
        more = results_table(rest, names=runs.short, caption="Continued.", best=False)
        body += html.folded(f"The other {len(rest)} rows", to_html(more))
    covered = "everything that the client sent" if _protected(runs) else "the certainty scores"
    fields = list(dict.fromkeys(key for record in runs.records for key in record))
    headers = (RESULTS[0], *runs.keys, *RESULTS[1:])
    means = [[_plain(row[name]) for name in headers] for row in rows]
    records = [[_plain(record.get(name)) for name in fields] for record in runs.records]
    body += html.note(
        "The best round is the maximum over the rounds. Choosing it takes the test data, so the last round is the fair "
        f"number. (ε, δ) is the cost of {covered}, for the client that spent most; – means that nothing was released "
        "through a privacy mechanism. Megabytes (10⁶ bytes) and seconds are for one seed, including its preparation. "
        f"{html.download('results', headers, means)} "
        f"{html.download('records', fields, records, text='Save every run, method and seed (CSV)')}",
        raw=True,
    )
    return html.section("results", "Results", body + _prototypes(runs.only))


def _by_setting(runs: Runs, measure: str, caption: str) -> Table:
    """Return methods by settings, the best of each column in bold."""
    settings, ranked_ = runs.settings_in_order(), measure == "accuracy"
    grid = [[runs.find(method, setting) for setting in settings] for method in runs.methods]
    bold = set()
    for column in range(len(settings)):
        means = [
            -math.inf if (row := line[column]) is None else row[f"{measure}_mean"] for line in grid
        ]
        bold |= {(number, column + 1) for number, mean in enumerate(means) if mean == max(means)}
    rows = [
        (
            *(method, *("–" if row is None else spread(row, measure) for row in line)),
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
    return Table(
        headers, rows, caption=f"{caption}{over}; the best of each setting is bold.", bold=bold
    )


def _prototypes(run: Run | None) -> str:
    """Return the last accuracies of each prototype, if there are several."""
    last: dict[str, dict[int, Record]] = defaultdict(dict)
    for row in sorted(run.metrics if run else [], key=lambda row: int(row["round"])):
        if row.get("accuracy_by_prototype"):
            last[str(row["method"])][int(row["seed"])] = row["accuracy_by_prototype"]
    names = sorted(
        {name for seeds in last.values() for accuracies in seeds.values() for name in accuracies}
    )
    if len(names) < 2:
        return ""

    def mean(seeds: Mapping[int, Record], name: str) -> str:
        known = [
            value for row in seeds.values() if math.isfinite(value := as_number(row.get(name)))
        ]
        return mean_and_deviation(over_seeds(known)[0])

    rows = [(method, *(mean(seeds, name) for name in names)) for method, seeds in last.items()]
    return to_html(
        Table(
            ("method", *names),
            rows,
            caption="Test accuracy of each prototype in the last round, %, mean over seeds.",
        )
    )


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
    bands += "; unfinished seeds count as far as they got" if len(counts) > 1 else ""
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
        (method, *([setting] if runs.keys else []), point.round, *_numbers(point))
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
        "curves", title, html.picture_of(figure, "curves", caption, headers, data, label=label)
    )


def _split(runs: Runs) -> str:
    if (run := runs.only) is None:
        return ""
    title, tables = "Data of the clients", run.split.get("tables", {})
    if not tables:
        return html.section(
            "split", title, html.note("The split of the data has not been written yet.")
        )
    seed = (
        run.scores.seed if run.scores and run.scores.seed in tables else min(tables, key=_natural)
    )
    table, classes = np.asarray(tables[seed]), run.split["classes"]
    alpha = run.split.get("alpha")  # clients with data of their own were not split
    how = f"α = {short(alpha)}" if alpha is not None else "as the clients brought them"
    caption = (
        f"Examples of each class at each client for seed {seed}, {how}. The area of a bubble shows their number, at "
        f"most {table.max(initial=0)}. A client holds {interval(table.sum(axis=1))} examples of "
        f"{interval((table > 0).sum(axis=1))} classes."
    )
    data = [(client, *counts) for client, counts in enumerate(table.tolist())]
    figure = figures.split_bubbles([("", table)], classes)
    label = f"Split of the data: {len(table)} clients, {len(classes)} classes, {how}, seed {seed}."
    body = html.picture_of(
        figure, "split", caption, ("client", *classes), data, label=label, name=f"split_seed_{seed}"
    )
    return html.section("split", title, body)


def _scores(runs: Runs) -> str:
    if runs.only is None or (scores := runs.only.scores) is None:
        return ""
    title, split = "Certainty scores", runs.only.split
    tables, classes = split.get("tables", {}), split.get("classes", [])
    if scores.seed not in tables:
        return html.section(
            "scores",
            title,
            html.note(f"The split of seed {scores.seed} to compare with is missing."),
        )
    table = np.asarray(tables[scores.seed])[scores.clients]
    shares, held = figures.class_shares(table), table.sum(axis=0) > 0
    overlap, equal = (
        np.minimum(shares, weights).sum(axis=0)[held].mean() if held.any() else 0.0
        for weights in (scores.weights, 1 / max(len(table), 1))
    )
    caption = (
        f"Left: the share of each class that a client holds. Right: the mean weight that the scores of "
        f"{scores.method}, seed {scores.seed}, give the client on test examples of that class. Each column sums to 1; "
        "clients are sorted by their main class. The more the two agree, the more each class is taught by clients that "
        "know it. "
        f"They overlap by {overlap:.2f} (1 = identical; equal weights would reach {equal:.2f})."
    )
    data = [
        (client, name, int(table[i, j]), f"{shares[i, j]:.6g}", f"{scores.weights[i, j]:.6g}")
        for i, client in enumerate(scores.clients)
        for j, name in enumerate(classes)
    ]
    label = f"Heat maps of {len(table)} clients and {len(classes)} classes that overlap by {overlap:.2f}."
    figure = figures.score_matrix(scores.weights, table, classes, scores.clients)
    headers = ("client", "class", "examples", "share_held", "weight")
    body = html.picture_of(figure, "scores", caption, headers, data, label=label)
    return html.section("scores", title, body + _highest_scores(scores, table, classes))


def _highest_scores(scores: Scores, table: Array, classes: Sequence[object]) -> str:
    """Return the public images or texts that clients score highest."""
    holders = [row for row in figures.order_clients(table) if table[row].sum()]
    picks = np.linspace(0, len(holders) - 1, min(MOST_ROWS, len(holders))).round().astype(int)
    shown, body = [holders[pick] for pick in picks], ""  # through all main classes
    clients = [scores.clients[row] for row in shown]
    some = (
        f" {len(shown)} of the {len(holders)} clients with data are shown."
        if len(shown) < len(holders)
        else ""
    )
    if scores.images is not None and scores.images.size and shown:
        count = scores.images.shape[1]
        caption = (
            f"The {count} auxiliary images that each client scores highest, beside the class it holds most of. If the "
            f"scores work, the images resemble that class.{some}"
        )
        figure = figures.top_images(
            scores.images[shown], table=table[shown], classes=classes, clients=clients
        )
        data = [
            (client, classes[int(counts.argmax())], int(counts.max()), int(counts.sum()))
            for client, counts in zip(clients, table[shown], strict=True)
        ]
        headers = ("client", "main_class", "examples_of_it", "examples")
        label = f"The {count} auxiliary images that each of {len(shown)} clients scores highest."
        body += html.picture_of(
            figure, "images", caption, headers, data, label=label, name="main_classes"
        )
    if scores.texts and shown:
        rows = [
            (
                f"client {scores.clients[row]}",
                classes[int(table[row].argmax())],
                " / ".join(scores.texts[row][:TOP_TEXTS]),
            )
            for row in shown
        ]
        caption = f"The {TOP_TEXTS} public texts that each client scores highest, beside the class it holds most of.{some}"
        body += to_html(Table(("client", "main class", "texts"), rows, "lll", caption))
    return body


def _privacy(runs: Runs) -> str:
    ledgers = {name: run.ledger for name, run in runs.runs.items() if run.ledger}
    if not ledgers:
        note = html.note("No ledger was written, so nothing is known about privacy.")
        return html.section("privacy", "Privacy", note) if runs.runs else ""
    entries = [
        {"run": name, **entry}
        for name, ledger in ledgers.items()
        for entry in ledger.get("entries", [])
    ]
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for entry in entries:
        release = "{}, for {}, noise {}".format(
            *(entry.get(key, "–") for key in ("mechanism", "purpose", "noise"))
        )
        groups[str(entry.get("method")), release].append(entry)
    rows = [
        (
            *(method, release, len({entry.get("client") for entry in group_})),
            interval(
                (entry.get("epsilon") for entry in group_),
                form=lambda value: short(value, digits=4),
            ),
            *(
                interval(e.get(key) for e in group_)
                for key in ("delta", "num_examples", "sensitivity", "sigma")
            ),
        )
        for (method, release), group_ in groups.items()
    ]
    body = against_privacy(runs)
    for sentence in _different(ledgers, "unprotected"):
        body += html.note(f"<strong>Not protected:</strong> {escape(sentence)}", raw=True)
    if rows:
        headers = (
            "method",
            "release",
            "clients",
            "ε",
            "δ",
            "examples\nper client",
            "sensitivity",
            "noise σ",
        )
        caption = f"What clients released through a privacy mechanism, over all seeds{'' if runs.only else ' and runs'}."
        body += to_html(Table(headers, rows, "llrrrrrr", caption))
    notes = [
        f"(ε, δ) holds for each release, between {text}."
        for text in _different(ledgers, "neighbours")
    ]
    if not rows:
        notes.insert(0, "No client released anything through a privacy mechanism.")
    repeats = Counter(
        tuple(map(entry.get, ("run", "method", "seed", "client"))) for entry in entries
    )
    if (most := max(repeats.values(), default=0)) > 1:
        notes.append(
            f"A client released up to {most} times in one run; the costs of its releases add up."
        )
    if len({(entry["run"], entry.get("seed")) for entry in entries}) > 1:
        notes.append(
            "Each seed is a separate run: repeating a run on the same private data adds to the cost."
        )
    if any(math.isinf(as_number(entry.get("epsilon"))) for entry in entries):
        notes.append("ε = ∞ means no differential privacy: the release may reveal single examples.")
    if any(entry.get("noise") == "simulated" for entry in entries):
        notes.append(
            "Simulated noise comes from the run's seeded generator, so that the run can be repeated. It shows the "
            "effect of privacy on accuracy, but anyone who knows the seed can remove it."
        )
    return html.section("privacy", "Privacy", body + "".join(map(html.note, notes)))


def _different(ledgers: Mapping[str, Record], key: str) -> list[str]:
    return list(dict.fromkeys(str(ledger.get(key, "–")) for ledger in ledgers.values()))


def _communication(runs: Runs) -> str:
    body = against_bytes(runs) if runs.only is None else _bytes_table(runs, runs.only)
    return html.section("communication", "Communication", body) if body else ""


def _bytes_table(runs: Runs, run: Run) -> str:
    totals = {row["method"]: row for row in group(runs.records)}
    rows = []
    for method, lines in _rounds(runs, run).items():
        asked, answered = (
            sum(len(line.get(key) or []) for line in lines)
            for key in ("clients_asked", "clients_answered")
        )
        reasons = Counter(
            str(reason) for line in lines for reason in (line.get("clients_dropped") or {}).values()
        )
        up, down = (
            sum(as_number(line.get(key), missing=0) for line in lines)
            for key in ("bytes_up", "bytes_down")
        )
        sent = (totals[method]["bytes_up"], totals[method]["bytes_down"])
        each = (up / answered if answered else None, down / asked if asked else None)
        dropped = ", ".join(f"{number} {reason}" for reason, number in reasons.most_common()) or "0"
        rows.append(
            (method, *map(megabytes, (*sent, *each)), f"{asked:,}", f"{answered:,}", dropped)
        )
    if not rows:
        return html.note("No round has been recorded yet.")
    headers = (
        *("method", "MB up\nper run", "MB down\nper run", "MB up\nper client\nand round"),
        *(
            "MB down\nper client\nand round",
            "clients\nasked",
            "clients\nanswered",
            "clients\ndropped",
        ),
    )
    caption = "Data sent to the server (up) and to the clients (down)."
    return to_html(Table(headers, rows, "lrrrrrrl", caption)) + html.note(
        "Totals per run are means over seeds and include the preparation. Per client and round, uploads are divided by "
        "the clients that answered, downloads by those asked. The last three columns count clients over all rounds and "
        "seeds."
    )


def _time(runs: Runs) -> str:
    run = runs.only
    phases = (
        list(dict.fromkeys(phase for row in run.metrics for phase in row.get("seconds") or {}))
        if run
        else []
    )
    if not phases or run is None:
        return ""
    rows = []
    for method, lines in _rounds(runs, run).items():
        seconds = [line.get("seconds") or {} for line in lines]
        spent = [
            sum(as_number(row.get(phase), missing=0) for row in seconds) / len(lines)
            for phase in phases
        ]
        rows.append((method, *map(short, (*spent, sum(spent)))))
    caption = "Seconds per round by phase, mean over rounds and seeds, without the preparation."
    return html.section(
        "time", "Time", to_html(Table(("method", *phases, "total"), rows, caption=caption))
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
    table = to_html(
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


def _numbers(point: Point) -> tuple[object, ...]:
    return (*(f"{value:.6g}" for value in (point.mean, point.low, point.high)), point.seeds)


def _rounds(runs: Runs, run: Run) -> dict[str, list[Row]]:
    """Return the recorded rounds of each method, in the order of the results."""
    groups: dict[str, list[Row]] = {method: [] for method in runs.methods}
    for row in run.metrics:
        groups.setdefault(str(row["method"]), []).append(row)
    return groups


def _common(runs: Runs) -> dict[str, Any]:
    """Return the settings that all runs share."""
    first, *others = [flatten(run.config) for run in runs.runs.values()] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(_plain(o.get(key)) == _plain(value) for o in others)
    }


def _protected(runs: Runs) -> bool:
    return any(run.updates_protected for run in runs.runs.values())


def _plain(value: Any) -> Any:
    """Return a value as a CSV file can hold it."""
    if value is None:
        return ""
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)


def _natural(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (10**9, key)
