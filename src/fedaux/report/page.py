"""The page of a run: one self-contained HTML file that says what was found, at what cost, and from what."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from fedaux.files import save_text
from fedaux.report import figures, html
from fedaux.report.record import Array, Record, Run, Scores, as_number, curve_points, read_run
from fedaux.report.svg import as_svg

MOST_ROWS_OF_IMAGES = 12
TOP_TEXTS = 3
RESULTS = (
    *("method", "accuracy_mean", "accuracy_std", "accuracy_max_mean", "accuracy_max_std", "seeds_done"),
    *("epsilon", "delta", "seconds", "bytes_up", "bytes_down"),
)
"""What of a summary's row is offered as a table."""


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Raises ValueError if ``directory`` is no run directory, or holds a file that cannot be read.
    """
    page = render(read_run(directory))
    path = Path(directory) / "report.html"
    save_text(path, page)  # a reader sees the old page or the new one, never half of it
    return path


def render(run: Run) -> str:
    """The whole page."""
    sections = (_results, _curves, _split, _scores, _privacy, _communication, _time, _configuration)
    body = "\n".join(part for part in (_header(run), *(section(run) for section in sections)) if part)
    return html.document(f"{run.name} · fedaux run", body)


def finding(run: Run) -> str:
    """What came out, in one plain sentence."""
    rows = [row for row in run.rows if math.isfinite(as_number(row.get("accuracy_mean")))]
    if not rows:
        return "Nothing has been measured yet."
    hero = next((row for row in rows if row["method"] == "fedaux"), rows[0])
    rivals = [row for row in rows if row is not hero]
    sentence = f"{hero['method']} reached {html.percent(hero['accuracy_mean'])} % in the last round"
    if not run.complete:
        sentence = f"So far {hero['method']} reached {html.percent(hero['accuracy_mean'])} % in its last recorded round"
    if rivals:
        rival = rivals[0]
        points = 100 * (hero["accuracy_mean"] - rival["accuracy_mean"])
        others = "the best of the others" if len(rivals) > 1 else "the only other method"
        if abs(points) < 0.05:
            sentence += f", level with {rival['method']}, {others}"
        else:
            sentence += f", {abs(points):.1f} points {'above' if points > 0 else 'below'} {rival['method']}, {others}"
        spread = 100 * max(as_number(row.get("accuracy_std"), missing=0) for row in (hero, rival))
        if hero["several"] and 0.05 <= abs(points) <= spread:
            sentence += " (a difference within the spread over seeds)"
    epsilon = hero.get("epsilon")
    if epsilon is not None:
        private = math.isfinite(as_number(epsilon))
        budget = f"({html.budget(epsilon)}, {html.short(hero.get('delta'))})-differentially private"
        if hero.get("updates_protected"):
            sentence += f", with all that a client sent {budget}"
        else:
            sentence += f", at {budget} scores" if private else ", with scores that are not differentially private"
    return sentence + "."


def _header(run: Run) -> str:
    config, split = run.config, run.config.get("split", {})
    seeds = run.summary.get("seeds") or config.get("seeds", [])
    facts = [
        ("{} data", config.get("data", {}).get("source")),
        ("{} as auxiliary data", config.get("auxiliary", {}).get("source")),
        ("{} clients", split.get("num_clients")),
        ("α = {}", None if config.get("data", {}).get("clients") else split.get("alpha")),
        ("{} of the clients a round", html.share(config.get("participation_rate"))),
        ("{} rounds", config.get("rounds")),
        ("seed {}" if len(seeds) == 1 else "seeds {}", ", ".join(str(seed) for seed in seeds) or None),
    ]
    line = " · ".join(escape(pattern.format(value)) for pattern, value in facts if value is not None)
    notice = ""
    if not run.complete:
        notice = (
            f'<p class="notice"><strong>This run is not finished.</strong> {escape(_missing(run))} '
            "All numbers below are preliminary.</p>\n"
        )
    return (
        f'<header>\n<p class="kind">fedaux run</p>\n<h1>{escape(run.name)}</h1>\n'
        f'<p class="finding">{escape(finding(run))}</p>\n{notice}<p class="facts">{line}</p>\n</header>'
    )


def _missing(run: Run) -> str:
    """What an unfinished run still lacks."""
    behind = {method: counts for method, counts in run.progress.items() if counts[0] < counts[1]}
    if not behind:
        return "Every round is recorded, but the summary is missing or not final."
    if len(behind) > 1 and len(set(behind.values())) == 1:
        done, planned = next(iter(behind.values()))
        return f"Rounds recorded over all seeds: {done} of {planned} for each of {', '.join(behind)}."
    rounds = ", ".join(f"{method} {done} of {planned}" for method, (done, planned) in behind.items())
    return f"Rounds recorded over all seeds: {rounds}."


def _results(run: Run) -> str:
    rows = run.rows
    if not rows:
        return html.section("results", "Results", html.note("No method has results yet."))
    seeds = len(run.summary.get("seeds", []))
    over = f"mean ± standard deviation over {seeds} seeds" if rows[0]["several"] else "one seed"
    body = html.table(
        ("method", "last round, %", "best round, %", "ε", "δ", "seconds", "MB up", "MB down"),
        [
            (
                row["method"],
                html.spread(row.get("accuracy_mean"), row.get("accuracy_std") if row["several"] else None),
                html.spread(row.get("accuracy_max_mean"), row.get("accuracy_max_std") if row["several"] else None),
                html.budget(row.get("epsilon")),
                html.short(row.get("delta")),
                html.decimal(row.get("seconds")),
                html.megabytes(row.get("bytes_up")),
                html.megabytes(row.get("bytes_down")),
            )
            for row in rows
        ],
        caption=f"Test accuracy ({over}) and cost of each method, best last round first.",
        best=0 if len(rows) > 1 else None,
    )
    protected = any(row.get("updates_protected") for row in rows)
    covered = "all that a client sent cost together" if protected else "the certainty scores cost"
    body += html.note(
        "Best round is the maximum over the rounds, which nobody without the test data could have picked. "
        f"ε and δ are what {covered}; – means that the method releases nothing through a "
        "privacy mechanism. Seconds and megabytes (10⁶ bytes) are totals of one run with its preparation. "
        + html.download("results", RESULTS, [[row.get(name, "") for name in RESULTS] for row in rows]),
        raw=True,
    )
    return html.section("results", "Results", body + _prototypes(run))


def _prototypes(run: Run) -> str:
    """Last accuracies of each prototype, where there are several."""
    last: dict[str, dict[int, Record]] = defaultdict(dict)
    for row in sorted(run.metrics, key=lambda row: int(row["round"])):
        if row.get("accuracy_by_prototype"):
            last[str(row["method"])][int(row["seed"])] = row["accuracy_by_prototype"]
    names = sorted({name for seeds in last.values() for accuracies in seeds.values() for name in accuracies})
    if len(names) < 2:
        return ""
    rows = [
        (method, *(html.percent(_mean(accuracies.get(name) for accuracies in seeds.values())) for name in names))
        for method, seeds in last.items()
    ]
    return html.table(
        ("method", *names), rows, caption="Accuracy of each prototype in the last round, %, mean over seeds."
    )


def _curves(run: Run) -> str:
    curves = curve_points(run.metrics)
    if not curves:
        return html.section("curves", "Learning curves", html.note("No round has been evaluated yet."))
    ends = ", ".join(f"{method} {html.percent(points[-1].mean)} %" for method, points in curves.items())
    svg = as_svg(
        figures.learning_curves(run.metrics),
        prefix="curves",
        label=f"Learning curves: test accuracy against the round. At the end: {ends}.",
    )
    seeds = {point.seeds for points in curves.values() for point in points}
    caption = "Test accuracy of the server's model after each round"
    if seeds != {1}:
        caption += ", mean over seeds; the band reaches from the worst to the best seed"
    if len(seeds) > 1:
        caption += "; where seeds are unfinished, over those that got there"
    data = [
        (method, *point[:1], *(f"{value:.6g}" for value in point[1:4]), point.seeds)
        for method, points in curves.items()
        for point in points
    ]
    header = ("method", "round", "accuracy_mean", "accuracy_min", "accuracy_max", "seeds")
    return html.section("curves", "Learning curves", html.picture(svg, caption + ".", "learning_curves", header, data))


def _split(run: Run) -> str:
    tables = run.split.get("tables", {})
    if not tables:
        return html.section("split", "Who holds what", html.note("The split of the data has not been written yet."))
    seed = run.scores.seed if run.scores and run.scores.seed in tables else min(tables, key=_natural)
    table, classes = np.asarray(tables[seed]), run.split["classes"]
    alpha = run.split.get("alpha")  # clients with data of their own were not split
    how = f"α = {html.short(alpha)}" if alpha is not None else "as the clients brought them"
    svg = as_svg(
        figures.split_bubbles([("", table)], classes),
        prefix="split",
        label=f"Split of the data: {len(table)} clients, {len(classes)} classes, {how}, seed {seed}.",
    )
    holds = (table > 0).sum(axis=1)
    sizes = table.sum(axis=1)
    caption = (
        f"Examples of each class at each client for seed {seed}, {how}; the area of a bubble shows their "
        f"number, at most {table.max(initial=0)}. A client holds {html.interval(sizes)} examples of "
        f"{html.interval(holds)} classes."
    )
    data = [(client, *counts) for client, counts in enumerate(table.tolist())]
    return html.section(
        "split", "Who holds what", html.picture(svg, caption, f"split_seed_{seed}", ("client", *classes), data)
    )


def _scores(run: Run) -> str:
    scores = run.scores
    if scores is None:
        return ""
    title = "What the certainty scores know"
    tables, classes = run.split.get("tables", {}), run.split.get("classes", [])
    if scores.seed not in tables:
        return html.section("scores", title, html.note(f"The split of seed {scores.seed} is missing, to compare with."))
    table = np.asarray(tables[scores.seed])[scores.clients]
    shares, held = figures.class_shares(table), table.sum(axis=0) > 0
    overlap = np.minimum(shares, scores.weights).sum(axis=0)[held].mean() if held.any() else 0.0
    equal = np.minimum(shares, 1 / max(len(table), 1)).sum(axis=0)[held].mean() if held.any() else 0.0
    svg = as_svg(
        figures.score_matrix(scores.weights, table, classes, scores.clients),
        prefix="scores",
        label=f"Heat maps of {len(table)} clients and {len(classes)} classes that overlap by {overlap:.2f}.",
    )
    caption = (
        f"Left: which share of each class a client holds. Right: the mean weight that the scores of "
        f"{scores.method}, seed {scores.seed}, give the client on test examples of that class. Each "
        "column sums to 1; clients are sorted by their main class. The more alike the pictures, the better "
        f"the right teachers are found: they overlap by {overlap:.2f} (1 = identical; equal weights "
        f"would reach {equal:.2f})."
    )
    data = [
        (
            client,
            name,
            int(table[row, column]),
            f"{shares[row, column]:.6g}",
            f"{scores.weights[row, column]:.6g}",
        )
        for row, client in enumerate(scores.clients)
        for column, name in enumerate(classes)
    ]
    header = ("client", "class", "examples", "share_held", "weight")
    body = html.picture(svg, caption, "scores", header, data)
    if scores.images is not None and scores.images.size and table.any():
        body += _images(scores, scores.images, table, classes)
    if scores.texts and table.any():
        body += _texts(scores, scores.texts, table, classes)
    return html.section("scores", title, body)


def _images(scores: Scores, images: Array, table: Array, classes: Sequence[object]) -> str:
    holders = [row for row in figures.order_clients(table) if table[row].sum()]
    picks = np.linspace(0, len(holders) - 1, min(MOST_ROWS_OF_IMAGES, len(holders))).round().astype(int)
    shown = [holders[pick] for pick in picks]  # through all main classes
    clients = [scores.clients[row] for row in shown]
    svg = as_svg(
        figures.top_images(images[shown], table=table[shown], classes=classes, clients=clients),
        prefix="images",
        label=f"The {images.shape[1]} auxiliary images that each of {len(shown)} clients scores highest.",
    )
    caption = (
        f"The {images.shape[1]} auxiliary images each client scores highest. A row is named by the client "
        "and the class it holds most of; where the scores work, the images resemble that class."
    )
    if len(shown) < len(holders):
        caption += f" {len(shown)} of the {len(holders)} clients with data are shown."
    data = [
        (client, classes[int(counts.argmax())] if counts.sum() else "", int(counts.max()), int(counts.sum()))
        for client, counts in zip(clients, table[shown], strict=True)
    ]
    return html.picture(svg, caption, "main_classes", ("client", "main_class", "examples_of_it", "examples"), data)


def _texts(scores: Scores, texts: list[list[str]], table: Array, classes: Sequence[object]) -> str:
    """The public texts that clients score highest, as a table."""
    shown = [row for row in figures.order_clients(table) if table[row].sum()][:MOST_ROWS_OF_IMAGES]
    rows = [
        (f"client {scores.clients[row]}", classes[int(table[row].argmax())], " / ".join(texts[row][:TOP_TEXTS]))
        for row in shown
    ]
    caption = f"The {TOP_TEXTS} public texts that each client scores highest, beside the class it holds most of."
    return html.table(("client", "main class", "texts"), rows, caption=caption, texts=(1, 2))


def _privacy(run: Run) -> str:
    if not run.ledger:
        note = html.note("No ledger was written: nothing can be said about privacy.")
        return html.section("privacy", "Privacy", note)
    entries: list[Record] = run.ledger.get("entries", [])
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for entry in entries:
        words = (entry.get(key, "–") for key in ("mechanism", "purpose", "noise"))
        release = "{}, for {}, noise {}".format(*words)
        groups[str(entry.get("method")), release].append(entry)
    columns = ("delta", "num_examples", "sensitivity", "sigma")
    rows = [
        (
            method,
            release,
            len({entry.get("client") for entry in group}),
            html.interval((entry.get("epsilon") for entry in group), form=html.budget),
            *(html.interval(entry.get(key) for entry in group) for key in columns),
        )
        for (method, release), group in groups.items()
    ]
    unprotected = escape(str(run.ledger.get("unprotected", "–")))
    body = html.note(f"<strong>Not protected:</strong> {unprotected}", raw=True)
    if rows:
        header = ("method", "release", "clients", "ε", "δ", "examples\nof a client", "sensitivity", "noise σ")
        caption = "What the clients released through a privacy mechanism, over all seeds."
        body += html.table(header, rows, caption=caption, texts=(1,))
    else:
        body += html.note("No client released anything through a privacy mechanism.")
    body += html.note(f"(ε, δ) holds for each release, between {run.ledger.get('neighbours', '–')}.")
    counts = Counter((entry.get("method"), entry.get("seed"), entry.get("client")) for entry in entries)
    if (most := max(counts.values(), default=0)) > 1:
        body += html.note(f"A client released up to {most} times in one run: the costs of its releases add up.")
    if len({entry.get("seed") for entry in entries}) > 1:
        body += html.note("Each seed is a run of its own: to repeat a run on the same private data costs again.")
    if any(math.isinf(as_number(entry.get("epsilon"))) for entry in entries):
        body += html.note("ε = ∞ means no differential privacy: the release may reveal single examples.")
    if any(entry.get("noise") == "simulated" for entry in entries):
        body += html.note(
            "Simulated noise comes from the run's own seeded generator, so that the run can be repeated: it "
            "shows what privacy costs in accuracy, but whoever knows the seed can take it off again."
        )
    return html.section("privacy", "Privacy", body)


def _communication(run: Run) -> str:
    totals = {row["method"]: row for row in run.rows}
    rows = []
    for method, lines in run.rounds_by_method.items():
        asked, answered = (
            sum(len(line.get(key) or []) for line in lines) for key in ("clients_asked", "clients_answered")
        )
        reasons = Counter(str(reason) for line in lines for reason in (line.get("clients_dropped") or {}).values())
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        up, down = (sum(as_number(line.get(key), missing=0) for line in lines) for key in ("bytes_up", "bytes_down"))
        total = totals.get(method, {})
        rows.append(
            (
                method,
                html.megabytes(total.get("bytes_up")),
                html.megabytes(total.get("bytes_down")),
                html.megabytes(up / answered if answered else None),
                html.megabytes(down / asked if asked else None),
                f"{asked:,}",
                f"{answered:,}",
                dropped or "0",
            )
        )
    if not rows:
        return html.section("communication", "Communication", html.note("No round has been recorded yet."))
    header = (
        *("method", "MB up\na run", "MB down\na run"),
        *("MB up\na client\nand round", "MB down\na client\nand round"),
        *("clients\nasked", "clients\nanswered", "clients\ndropped"),
    )
    caption = "What was sent to the server (up) and to the clients (down)."
    note = html.note(
        "A run's totals are means over seeds and include the preparation phase. Per client and round, what "
        "was sent up is divided by the clients that answered and what was sent down by those asked. The last "
        "three columns count clients over all rounds and seeds."
    )
    return html.section("communication", "Communication", html.table(header, rows, caption=caption, texts=(7,)) + note)


def _time(run: Run) -> str:
    phases = list(dict.fromkeys(phase for row in run.metrics for phase in row.get("seconds") or {}))
    if not phases:
        return ""
    rows = []
    for method, lines in run.rounds_by_method.items():
        spent = [
            sum(as_number((line.get("seconds") or {}).get(phase), missing=0) for line in lines) / len(lines)
            for phase in phases
        ]
        rows.append((method, *(html.short(value) for value in spent), html.short(sum(spent))))
    caption = "Seconds a round by phase, mean over rounds and seeds, without the preparation."
    return html.section("time", "Time", html.table(("method", *phases, "together"), rows, caption=caption))


def _configuration(run: Run) -> str:
    rows = list(run.environment.items())
    if digest := run.summary.get("config_sha256"):
        rows.append(("config SHA-256", digest))
    body = (
        "<details>\n<summary>Resolved configuration</summary>\n"
        f"<pre>{escape(run.config_text)}</pre>\n</details>\n"
        + html.table(("", ""), rows, caption="Versions and machine.", texts=(1,))
    )
    return html.section("configuration", "Configuration and versions", body)


def _natural(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (10**9, key)


def _mean(values: Iterable[Any]) -> float:
    known = [number for number in map(as_number, values) if math.isfinite(number)]
    return sum(known) / len(known) if known else math.nan
