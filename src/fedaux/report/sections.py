"""Sections of a page about one run: its split and scores, and privacy, communication and time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from fedaux.core.asks import SHARED_PHASES
from fedaux.formatting import as_number, interval, mean_and_deviation, megabytes, over_seeds, short
from fedaux.report import data_figures, html
from fedaux.report.comparison import against_bytes, against_privacy
from fedaux.report.results import Runs, group, is_bound
from fedaux.report.run import Array, Record, Row, Run
from fedaux.report.tables import Table

MOST_ROWS = 12


def prototype_table(run: Run | None) -> str:
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
    return html.table(
        Table(
            ("method", *names),
            rows,
            caption="Test accuracy of each prototype in the last round, %, mean over seeds.",
        )
    )


def split_section(runs: Runs) -> str:
    """Return the split of the data over the clients."""
    if (run := runs.only) is None:
        return ""
    title, tables = "Data of the clients", run.split.get("tables", {})
    if not tables:
        missing = html.note("The split of the data has not been written yet.")
        return html.section("split", title, missing + loading_notes(run))
    seed = (
        run.scores.seed if run.scores and run.scores.seed in tables else min(tables, key=_natural)
    )
    table, classes = np.asarray(tables[seed]), run.split["classes"]
    alpha = run.split.get("alpha")  # missing if clients have their own data
    how = f"α = {short(alpha)}" if alpha is not None else "each client with its own data"
    caption = (
        f"Examples of each class at each client for seed {seed}, {how}. The area of a bubble shows "
        f"their number, at most {table.max(initial=0)}. A client holds "
        f"{interval(table.sum(axis=1))} examples of {interval((table > 0).sum(axis=1))} classes."
    )
    data = [
        (run.names[client] if run.names else client, *counts)
        for client, counts in enumerate(table.tolist())
    ]
    figure = data_figures.split_bubbles([("", table)], classes, clients=run.names)
    label = f"Split of the data: {len(table)} clients, {len(classes)} classes, {how}, seed {seed}."
    body = html.picture(
        figure,
        "split",
        caption,
        Table(("client", *classes), data),
        label=label,
        name=f"split_seed_{seed}",
    )
    return html.section("split", title, body + loading_notes(run))


def loading_notes(run: Run) -> str:
    """Return the warnings and the skipped rows of the data, private and public."""
    body = "".join(
        f'<p class="notice">{escape(str(line))}</p>\n' for line in run.notes.get("warnings", [])
    )
    skipped = run.notes.get("skipped", [])
    rows = [
        (str(one["place"]), str(one["setting"]), one["skipped"], one["rows"], one["reasons"][0])
        for one in skipped
    ]
    if rows:
        total = sum(row[2] for row in rows)
        caption = f"Rows that were skipped: {total} of {sum(row[3] for row in rows)}."
        heads = ("place", "allowed by", "skipped", "of", "first reason")
        body += html.table(Table(heads, rows, caption=caption))
    return body


def scores_section(runs: Runs) -> str:
    """Return the certainty scores beside the data of the clients."""
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
    clients = [_label(runs.only, client) for client in scores.clients]
    shares, held = data_figures.class_shares(table), table.sum(axis=0) > 0
    overlap, equal = (
        np.minimum(shares, weights).sum(axis=0)[held].mean() if held.any() else 0.0
        for weights in (scores.weights, 1 / max(len(table), 1))
    )
    caption = (
        "Left: the share of each class that a client holds. Right: the mean weight that the scores "
        f"of {scores.method}, seed {scores.seed}, give the client on test examples of that class. "
        "Each column sums to 1; clients are sorted by their main class. The more the two agree, "
        f"the more each class is taught by clients that hold it. They overlap by {overlap:.2f} (1 "
        f"= identical; equal weights would reach {equal:.2f})."
    )
    data = [
        (client, name, int(table[i, j]), f"{shares[i, j]:.6g}", f"{scores.weights[i, j]:.6g}")
        for i, client in enumerate(clients)
        for j, name in enumerate(classes)
    ]
    label = f"Heat maps of {len(table)} clients and {len(classes)} classes, overlap {overlap:.2f}."
    figure = data_figures.score_matrix(scores.weights, table, classes, clients)
    headers = ("client", "class", "examples", "share_held", "weight")
    body = html.picture(figure, "scores", caption, Table(headers, data), label=label)
    return html.section("scores", title, body)


def _label(run: Run, client: int) -> object:
    """Return a client's name or, if it has none, its number."""
    return run.names[client] if client < len(run.names) else client


def classes_section(runs: Runs) -> str:
    """Return figures by class of the last round, and the confusion matrix of one method."""
    run = runs.only
    last: dict[str, list[Row]] = defaultdict(list)
    for method in runs.methods:
        for row in run.metrics if run else []:
            if row.get("confusion") and str(row["method"]) == method:
                last[method].append(row)
    if run is None or not last:
        return ""
    counts = {
        method: np.sum([row["confusion"] for row in rows], axis=0) for method, rows in last.items()
    }
    classes = run.split.get("classes") or range(len(next(iter(counts.values()))))
    headers = ("method", "balanced\naccuracy", "macro F1", "AUC")
    rows = [
        (method, *(_spread_of(own, key) for key in ("balanced_accuracy", "macro_f1", "auc")))
        for method, own in last.items()
    ]
    caption = "Figures that count every class equally, in % of the last round."
    body = html.table(Table(headers, rows, "lrrr", caption))
    shares = {method: _by_row(own).diagonal() for method, own in counts.items()}
    by_class = Table(
        ("class", *shares),
        [
            (name, *(mean_and_deviation(own[label]) for own in shares.values()))
            for label, name in enumerate(classes)
        ],
        "l" + "r" * len(shares),
        "Accuracy on the test examples of each class, %, mean over seeds.",
    )
    table = html.table(by_class)
    title = f"Accuracy on each of {len(classes)} classes"
    body += table if len(classes) <= MOST_ROWS else html.folded(title, table)
    hero = next((name for name in last if not is_bound(name)), next(iter(last)))
    figure = data_figures.confusion(_by_row(counts[hero]), classes)
    data = [
        (method, classes[label], classes[guess], int(number))
        for method, own in counts.items()
        for (label, guess), number in np.ndenumerate(own)
    ]
    caption = (
        f"How {hero} classifies the test examples of each class in the last round, in %; each row "
        "sums to 100."
    )
    numbers = Table(("method", "class", "predicted", "examples"), data)
    body += html.picture(figure, "confusion", caption, numbers)
    body += html.note(
        "Balanced accuracy is the mean over classes of the accuracy on each; macro F1 and AUC (one "
        "class against the rest) are means over classes, too. Of several prototypes, and of "
        "clients that train alone, these are means over models."
    )
    return html.section("classes", "Classes", body)


def _by_row(counts: Array) -> Array:
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


def _spread_of(rows: Sequence[Row], key: str) -> str:
    known = [float(row[key]) for row in rows if row.get(key) is not None]
    mean, deviation = over_seeds(known)
    return mean_and_deviation(mean, deviation if len(known) > 1 else None)


def privacy_section(runs: Runs) -> str:
    """Return the privacy cost from the ledgers, and the parts that are not protected."""
    ledgers = {name: run.ledger for name, run in runs.runs.items() if run.ledger}
    if not ledgers:
        note = html.note("There is no ledger, so the privacy cost is unknown.")
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
        over = "seeds" if runs.only else "seeds and runs"
        caption = f"Releases through a privacy mechanism, over all {over}."
        body += html.table(Table(headers, rows, "llrrrrrr", caption))
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
            "Each seed is a separate run: repeating a run on the same private data adds to the "
            "cost."
        )
    if any(math.isinf(as_number(entry.get("epsilon"))) for entry in entries):
        notes.append("ε = ∞ means no differential privacy: the release may reveal single examples.")
    if any(entry.get("noise") == "simulated" for entry in entries):
        notes.append(
            "Simulated noise comes from the run's seeded generator, so that the run can be "
            "repeated. It shows the effect of privacy on accuracy, but anyone who knows the seed "
            "can remove it."
        )
    return html.section("privacy", "Privacy", body + "".join(map(html.note, notes)))


def _different(ledgers: Mapping[str, Record], key: str) -> list[str]:
    return list(dict.fromkeys(str(ledger.get(key, "–")) for ledger in ledgers.values()))


def communication_section(runs: Runs) -> str:
    """Return the bytes that were sent."""
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
    return html.table(Table(headers, rows, "lrrrrrrl", caption)) + html.note(
        "Totals per run are means over seeds and include the preparation. Per client and round, "
        "uploads are divided by the clients that answered, downloads by those asked. The last "
        "three columns count clients over all rounds and seeds."
    )


def time_section(runs: Runs) -> str:
    """Return the seconds per round of each phase."""
    run = runs.only
    if run is None:
        return ""
    named = dict.fromkeys(phase for row in run.metrics for phase in row.get("seconds") or {})
    phases = [phase for phase in named if phase not in SHARED_PHASES]
    if not phases:
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
    body = html.table(Table(("method", *phases, "total"), rows, caption=caption))
    if shared := as_number(run.summary.get("shared_seconds"), missing=0):
        body += html.note(
            f"h0 and features, which methods share, took {short(shared)} s in the whole run."
        )
    return html.section("time", "Time", body)


def _rounds(runs: Runs, run: Run) -> dict[str, list[Row]]:
    """Return the recorded rounds of each method, in the order of the results."""
    groups: dict[str, list[Row]] = {method: [] for method in runs.methods}
    for row in run.metrics:
        groups.setdefault(str(row["method"]), []).append(row)
    return groups


def _natural(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (10**9, key)
