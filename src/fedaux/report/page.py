"""The page of a run: one self-contained HTML file that says what was found, at what cost, and from what."""

import csv
import io
import json
import math
import os
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from safetensors import SafetensorError, safe_open

from fedaux.report import figures

REQUIRED = (
    "config.toml",
    "environment.json",
)  # written before the first round; all else may still be missing
MOST_ROWS_OF_IMAGES = 12
Record = Mapping[str, Any]

CSS = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1c2126;--soft:#59636e;--line:#d5dae0;--wash:#f3f5f8;
--link:#0a5ea8;--warn:#8a3c00;--warn-wash:#fff3e6}
@media (prefers-color-scheme:dark){:root{--ground:#14171b;--ink:#e4e8ec;--soft:#a0abb7;--line:#363d46;
--wash:#1d2228;--link:#79bdf5;--warn:#ffb67a;--warn-wash:#2f2216}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);line-height:1.55;overflow-wrap:anywhere;
font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:52rem;margin:0 auto;padding:2rem 1rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .75rem;letter-spacing:-.01em}
h2{font-size:1.25rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.75rem 0 .5rem}
p{margin:.6rem 0;max-width:42rem}
.kind{margin:0 0 .25rem;color:var(--soft);font-size:.875rem}
.finding{font-size:1.2rem;line-height:1.45;margin:.5rem 0 1rem}
.facts{color:var(--soft);font-size:.925rem}
.notice{background:var(--warn-wash);color:var(--warn);border-left:4px solid;padding:.6rem .9rem}
a{color:var(--link)}
.scroll{overflow-x:auto;overscroll-behavior-x:contain}
.scroll:focus-visible{outline:2px solid var(--link);outline-offset:2px}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;min-width:100%}
.caption{color:var(--soft);font-size:.9rem;margin:1.25rem 0 .3rem}
th,td{padding:.4rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{padding-left:.2rem}
.text{text-align:left}
td.wrap{white-space:normal;min-width:9.5rem;overflow-wrap:anywhere}
thead th{white-space:pre;color:var(--soft);font-weight:600;vertical-align:bottom}
tbody th{font-weight:500}
tr.best th,tr.best td{font-weight:700;background:var(--wash)}
figure{margin:1.25rem 0 1.75rem}
figure svg{display:block;height:auto}
figcaption a{white-space:nowrap}
figcaption{color:var(--soft);font-size:.9rem;margin-top:.6rem;max-width:42rem}
details{border:1px solid var(--line);border-radius:6px;margin:1rem 0}
summary{cursor:pointer;padding:.6rem .9rem;font-weight:600}
pre{margin:0;padding:.2rem .9rem .9rem;overflow-x:auto;overflow-wrap:normal;font-size:.85rem;line-height:1.45;
font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:30rem){main{padding-top:1.25rem}h1{font-size:1.45rem}.finding{font-size:1.08rem}}
@media print{details,.scroll{overflow:visible}figure,table{break-inside:avoid}}
"""


@dataclass(frozen=True)
class Scores:
    """What ``scores.safetensors`` holds; images are None where the auxiliary data has none."""

    weights: figures.Array
    images: figures.Array | None
    method: str
    seed: str
    clients: list[int]


@dataclass(frozen=True)
class Run:
    """The files of a run directory, read; those not written yet are empty."""

    name: str
    config_text: str
    config: Record
    environment: Record
    metrics: list[dict[str, Any]]
    ledger: Record
    summary: Record
    split: Record
    scores: Scores | None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The summary's rows, best first; without a summary, the last accuracies that were recorded."""
        rows = [dict(row) for row in self.summary.get("rows", [])] or [
            {"method": method, "accuracy_mean": points[-1].mean}
            for method, points in figures.curve_points(self.metrics).items()
        ]
        for row in rows:
            row["method"] = str(row["method"])
            row["several"] = row.get("seeds_done", len(self.summary.get("seeds", []))) > 1
        return sorted(rows, key=lambda row: -_number(row.get("accuracy_mean"), missing=-1))

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        """Rounds recorded and rounds planned, over all seeds, for each method."""
        seeds = self.config.get("seeds", [0])
        planned = int(self.config.get("rounds", 0)) * (len(seeds) if isinstance(seeds, list) else 1)
        method = self.config.get("method", [])
        methods = [str(name) for name in (method if isinstance(method, list) else [method])]
        recorded = Counter(str(row["method"]) for row in self.metrics)
        return {name: (recorded[name], planned) for name in dict.fromkeys([*methods, *recorded])}

    @property
    def complete(self) -> bool:
        """Whether the summary says so and no planned round is missing."""
        return bool(self.summary.get("complete")) and all(done >= all_ for done, all_ in self.progress.values())


def write_report(directory: Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    Raises ValueError if ``directory`` is no run directory, or holds a file that cannot be read.
    """
    page = render(read_run(directory))
    path = Path(directory) / "report.html"
    temporary = path.with_name(f".report.html.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)  # a reader sees the old page or the new one, never half of it
    finally:
        temporary.unlink(missing_ok=True)
    return path


def read_run(directory: Path) -> Run:
    """Read a run directory, finished or not. Raises ValueError naming the directory and what is wrong."""
    directory = Path(directory)
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
    if missing:
        raise ValueError(f"{directory} is not a run directory: {' and '.join(missing)} missing")
    text = (directory / "config.toml").read_text(encoding="utf-8", errors="replace")
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{directory / 'config.toml'} is not valid TOML: {error}") from error
    summary = _read_json(directory / "summary.json")
    return Run(
        name=str(summary.get("name") or config.get("name") or directory.resolve().name),
        config_text=text,
        config=config,
        environment=_read_json(directory / "environment.json"),
        metrics=_read_metrics(directory / "metrics.jsonl"),
        ledger=_read_json(directory / "ledger.json"),
        summary=summary,
        split=_read_json(directory / "split.json"),
        scores=_read_scores(directory / "scores.safetensors"),
    )


def render(run: Run) -> str:
    """The whole page."""
    sections = (_results, _curves, _split, _scores, _privacy, _communication, _time, _configuration)
    body = "\n".join(part for part in (_header(run), *(section(run) for section in sections)) if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # The browser itself is told that this page loads nothing and runs nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:;'
        " style-src 'unsafe-inline'\">\n"
        f'<title>{escape(run.name)} · fedaux run</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def finding(run: Run) -> str:
    """What came out, in one plain sentence."""
    rows = [row for row in run.rows if math.isfinite(_number(row.get("accuracy_mean")))]
    if not rows:
        return "Nothing has been measured yet."
    hero = next((row for row in rows if row["method"] == "fedaux"), rows[0])
    rivals = [row for row in rows if row is not hero]
    sentence = f"{hero['method']} reached {_percent(hero['accuracy_mean'])} % in the last round"
    if not run.complete:
        sentence = f"So far {hero['method']} reached {_percent(hero['accuracy_mean'])} % in its last recorded round"
    if rivals:
        rival = rivals[0]
        points = 100 * (hero["accuracy_mean"] - rival["accuracy_mean"])
        others = "the best of the others" if len(rivals) > 1 else "the only other method"
        if abs(points) < 0.05:
            sentence += f", level with {rival['method']}, {others}"
        else:
            sentence += f", {abs(points):.1f} points {'above' if points > 0 else 'below'} {rival['method']}, {others}"
        spread = 100 * max(_number(row.get("accuracy_std"), missing=0) for row in (hero, rival))
        if hero["several"] and 0.05 <= abs(points) <= spread:
            sentence += " (a difference within the spread over seeds)"
    epsilon = hero.get("epsilon")
    if epsilon is not None:
        private = math.isfinite(_number(epsilon))
        budget = f"({_budget(epsilon)}, {_short(hero.get('delta'))})-differentially private"
        sentence += f", at {budget} scores" if private else ", with scores that are not differentially private"
    return sentence + "."


def _header(run: Run) -> str:
    config, split = run.config, run.config.get("split", {})
    seeds = run.summary.get("seeds") or config.get("seeds", [])
    facts = [
        ("{} data", config.get("data", {}).get("source")),
        ("{} as auxiliary data", config.get("auxiliary", {}).get("source")),
        ("{} clients", split.get("num_clients")),
        ("α = {}", split.get("alpha")),
        ("{} of the clients a round", _share(config.get("participation_rate"))),
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
        return _section("results", "Results", _note("No method has results yet."))
    seeds = len(run.summary.get("seeds", []))
    over = f"mean ± standard deviation over {seeds} seeds" if rows[0]["several"] else "one seed"
    body = _table(
        ("method", "last round, %", "best round, %", "ε", "δ", "seconds", "MB up", "MB down"),
        [
            (
                row["method"],
                _spread(row.get("accuracy_mean"), row.get("accuracy_std") if row["several"] else None),
                _spread(row.get("accuracy_max_mean"), row.get("accuracy_max_std") if row["several"] else None),
                _budget(row.get("epsilon")),
                _short(row.get("delta")),
                _decimal(row.get("seconds")),
                _megabytes(row.get("bytes_up")),
                _megabytes(row.get("bytes_down")),
            )
            for row in rows
        ],
        caption=f"Test accuracy ({over}) and cost of each method, best last round first.",
        best=0 if len(rows) > 1 else None,
    )
    body += _note(
        "Best round is the maximum over the rounds, which nobody without the test data could have picked. "
        "ε and δ are what the certainty scores cost; – means that the method releases nothing through a "
        "privacy mechanism. Seconds and megabytes (10⁶ bytes) are totals of one run with its preparation."
    )
    return _section("results", "Results", body + _prototypes(run))


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
        (method, *(_percent(_mean(accuracies.get(name) for accuracies in seeds.values())) for name in names))
        for method, seeds in last.items()
    ]
    return _table(("method", *names), rows, caption="Accuracy of each prototype in the last round, %, mean over seeds.")


def _curves(run: Run) -> str:
    curves = figures.curve_points(run.metrics)
    if not curves:
        return _section("curves", "Learning curves", _note("No round has been evaluated yet."))
    ends = ", ".join(f"{method} {_percent(points[-1].mean)} %" for method, points in curves.items())
    svg = figures.as_svg(
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
    return _section("curves", "Learning curves", _picture(svg, caption + ".", "learning_curves", header, data))


def _split(run: Run) -> str:
    tables = run.split.get("tables", {})
    if not tables:
        return _section("split", "Who holds what", _note("The split of the data has not been written yet."))
    seed = run.scores.seed if run.scores and run.scores.seed in tables else min(tables, key=_natural)
    table, classes = np.asarray(tables[seed]), run.split["classes"]
    alpha = _short(run.split.get("alpha"))
    svg = figures.as_svg(
        figures.split_bubbles([("", table)], classes),
        prefix="split",
        label=f"Split of the data: {len(table)} clients, {len(classes)} classes, alpha {alpha}, seed {seed}.",
    )
    holds = (table > 0).sum(axis=1)
    sizes = table.sum(axis=1)
    caption = (
        f"Examples of each class at each client for seed {seed}, α = {alpha}; the area of a bubble shows their "
        f"number, at most {table.max(initial=0)}. A client holds {_range(sizes)} examples of "
        f"{_range(holds)} classes."
    )
    data = [(client, *counts) for client, counts in enumerate(table.tolist())]
    return _section("split", "Who holds what", _picture(svg, caption, f"split_seed_{seed}", ("client", *classes), data))


def _scores(run: Run) -> str:
    scores = run.scores
    if scores is None:
        return ""
    title = "What the certainty scores know"
    tables, classes = run.split.get("tables", {}), run.split.get("classes", [])
    if scores.seed not in tables:
        return _section("scores", title, _note(f"The split of seed {scores.seed} is missing, to compare with."))
    table = np.asarray(tables[scores.seed])[scores.clients]
    shares, held = figures.class_shares(table), table.sum(axis=0) > 0
    overlap = np.minimum(shares, scores.weights).sum(axis=0)[held].mean() if held.any() else 0.0
    equal = np.minimum(shares, 1 / max(len(table), 1)).sum(axis=0)[held].mean() if held.any() else 0.0
    svg = figures.as_svg(
        figures.score_matrix(scores.weights, table, classes, scores.clients),
        prefix="scores",
        label=f"Heat maps of {len(table)} clients and {len(classes)} classes that overlap by {overlap:.2f}.",
    )
    caption = (
        f"Left: which share of each class a client holds. Right: the mean weight that the scores of "
        f"{scores.method}, seed {scores.seed}, give the client on test images of that class. Each "
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
    body = _picture(svg, caption, "scores", header, data)
    if scores.images is not None and scores.images.size and table.any():
        body += _images(scores, scores.images, table, classes)
    return _section("scores", title, body)


def _images(scores: Scores, images: figures.Array, table: figures.Array, classes: Sequence[object]) -> str:
    holders = [row for row in figures.order_clients(table) if table[row].sum()]
    picks = np.linspace(0, len(holders) - 1, min(MOST_ROWS_OF_IMAGES, len(holders))).round().astype(int)
    shown = [holders[pick] for pick in picks]  # through all main classes
    clients = [scores.clients[row] for row in shown]
    svg = figures.as_svg(
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
    return _picture(svg, caption, "main_classes", ("client", "main_class", "examples_of_it", "examples"), data)


def _privacy(run: Run) -> str:
    if not run.ledger:
        note = _note("No ledger was written: nothing can be said about privacy.")
        return _section("privacy", "Privacy", note)
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
            _range((entry.get("epsilon") for entry in group), form=_budget),
            *(_range(entry.get(key) for entry in group) for key in columns),
        )
        for (method, release), group in groups.items()
    ]
    unprotected = escape(str(run.ledger.get("unprotected", "–")))
    body = _note(f"<strong>Not protected:</strong> {unprotected}", raw=True)
    if rows:
        header = ("method", "release", "clients", "ε", "δ", "examples\nof a client", "sensitivity", "noise σ")
        caption = "What the clients released through a privacy mechanism, over all seeds."
        body += _table(header, rows, caption=caption, texts=(1,))
    else:
        body += _note("No client released anything through a privacy mechanism.")
    body += _note(f"(ε, δ) holds for each release, between {run.ledger.get('neighbours', '–')}.")
    counts = Counter((entry.get("method"), entry.get("seed"), entry.get("client")) for entry in entries)
    if (most := max(counts.values(), default=0)) > 1:
        body += _note(f"A client released up to {most} times in one run: the costs of its releases add up.")
    if len({entry.get("seed") for entry in entries}) > 1:
        body += _note("Each seed is a run of its own: to repeat a run on the same private data costs again.")
    if any(math.isinf(_number(entry.get("epsilon"))) for entry in entries):
        body += _note("ε = ∞ means no differential privacy: the release may reveal single examples.")
    if any(entry.get("noise") == "simulated" for entry in entries):
        body += _note(
            "Simulated noise comes from the run's own seeded generator, so that the run can be repeated: it "
            "shows what privacy costs in accuracy, but whoever knows the seed can take it off again."
        )
    return _section("privacy", "Privacy", body)


def _communication(run: Run) -> str:
    totals = {row["method"]: row for row in run.rows}
    rows = []
    for method, lines in _by_method(run).items():
        asked, answered = (
            sum(len(line.get(key) or []) for line in lines) for key in ("clients_asked", "clients_answered")
        )
        reasons = Counter(str(reason) for line in lines for reason in (line.get("clients_dropped") or {}).values())
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        up, down = (sum(_number(line.get(key), missing=0) for line in lines) for key in ("bytes_up", "bytes_down"))
        total = totals.get(method, {})
        rows.append(
            (
                method,
                _megabytes(total.get("bytes_up")),
                _megabytes(total.get("bytes_down")),
                _megabytes(up / answered if answered else None),
                _megabytes(down / asked if asked else None),
                f"{asked:,}",
                f"{answered:,}",
                dropped or "0",
            )
        )
    if not rows:
        return _section("communication", "Communication", _note("No round has been recorded yet."))
    header = (
        *("method", "MB up\na run", "MB down\na run"),
        *("MB up\na client\nand round", "MB down\na client\nand round"),
        *("clients\nasked", "clients\nanswered", "clients\ndropped"),
    )
    caption = "What was sent to the server (up) and to the clients (down)."
    note = _note(
        "A run's totals are means over seeds and include the preparation phase. Per client and round, what "
        "was sent up is divided by the clients that answered and what was sent down by those asked. The last "
        "three columns count clients over all rounds and seeds."
    )
    return _section("communication", "Communication", _table(header, rows, caption=caption, texts=(7,)) + note)


def _time(run: Run) -> str:
    phases = list(dict.fromkeys(phase for row in run.metrics for phase in row.get("seconds") or {}))
    if not phases:
        return ""
    rows = []
    for method, lines in _by_method(run).items():
        spent = [
            sum(_number((line.get("seconds") or {}).get(phase), missing=0) for line in lines) / len(lines)
            for phase in phases
        ]
        rows.append((method, *(_short(value) for value in spent), _short(sum(spent))))
    caption = "Seconds a round by phase, mean over rounds and seeds, without the preparation."
    return _section("time", "Time", _table(("method", *phases, "together"), rows, caption=caption))


def _configuration(run: Run) -> str:
    rows = list(run.environment.items())
    if digest := run.summary.get("config_sha256"):
        rows.append(("config SHA-256", digest))
    body = (
        "<details>\n<summary>Resolved configuration</summary>\n"
        f"<pre>{escape(run.config_text)}</pre>\n</details>\n"
        + _table(("", ""), rows, caption="Versions and machine.", texts=(1,))
    )
    return _section("configuration", "Configuration and versions", body)


def _section(key: str, title: str, body: str) -> str:
    return f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(title)}</h2>\n{body}</section>'


def _note(text: str, *, raw: bool = False) -> str:
    return f"<p>{text if raw else escape(text)}</p>\n"


def _table(
    header: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    best: int | None = None,
    texts: Sequence[int] = (),
) -> str:
    """A table that scrolls in its own box; the first column names the row, those in ``texts`` are words."""

    def kind(column: int, *, wrap: bool = False) -> str:
        words = column == 0 or column in texts
        return (' class="text wrap"' if wrap and column else ' class="text"') if words else ""

    head = "".join(f'<th scope="col"{kind(column)}>{escape(str(name))}</th>' for column, name in enumerate(header))
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(
            f"<td{kind(column, wrap=len(str(cell)) > 18)}>{escape(str(cell))}</td>"
            for column, cell in enumerate(row)
            if column
        )
        mark = ' class="best"' if number == best else ""
        lines.append(f'<tr{mark}><th scope="row" class="text">{escape(str(row[0]))}</th>{cells}</tr>')
    top = f"<thead><tr>{head}</tr></thead>\n" if any(header) else ""
    body = "\n".join(lines)
    return (
        f'<p class="caption">{escape(caption)}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">\n<table>\n'
        f"{top}<tbody>\n{body}\n</tbody>\n</table>\n</div>\n"
    )


def _picture(svg: str, caption: str, name: str, header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A figure with its caption and a link that saves its numbers."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    link = f"data:text/csv;charset=utf-8,{quote(buffer.getvalue())}"
    return (
        f'<figure>\n<div class="scroll">{svg}</div>\n<figcaption>{escape(caption)} '
        f'<a download="{escape(name)}.csv" href="{link}">Save the numbers (CSV)</a></figcaption>\n</figure>\n'
    )


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, where an object was expected")
    return value


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rounds of ``metrics.jsonl``: a repeated round's last line wins, a cut-off end is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rounds: dict[tuple[str, int, int], dict[str, Any]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            rounds[str(row["method"]), int(row["seed"]), int(row["round"])] = row
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}, is not a round of a run: {error!r}") from error
    return list(rounds.values())


def _read_scores(path: Path) -> Scores | None:
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="numpy") as file:
            words, names = file.metadata() or {}, set(file.keys())
            weights = file.get_tensor("weights_by_class")
            images = file.get_tensor("top_images") if "top_images" in names else None
        clients = [int(client) for client in json.loads(words["clients"])]
        return Scores(weights, images, words["method"], words["seed"], clients)
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold certainty scores: {error!r}") from error


def _by_method(run: Run) -> dict[str, list[dict[str, Any]]]:
    """The recorded rounds of each method, methods in the order of the result table."""
    groups: dict[str, list[dict[str, Any]]] = {row["method"]: [] for row in run.rows}
    for row in run.metrics:
        groups.setdefault(str(row["method"]), []).append(row)
    return {method: rows for method, rows in groups.items() if rows}


def _natural(key: str) -> tuple[int, str]:
    return (int(key), "") if key.isdigit() else (10**9, key)


def _number(value: Any, *, missing: float = math.nan) -> float:
    """A JSON number, ``missing`` for null or NaN, infinity for "inf"."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return missing
    return missing if math.isnan(number) else number


def _mean(values: Iterable[Any]) -> float:
    known = [number for number in map(_number, values) if math.isfinite(number)]
    return sum(known) / len(known) if known else math.nan


def _short(value: Any) -> str:
    """Three digits that matter: 0.0522, 1e-5."""
    number = _number(value)
    if math.isnan(number):
        return "–"
    if math.isinf(number):
        return "∞"
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", f"{number:.3g}")


def _budget(value: Any) -> str:
    text = _short(value)
    return f"{text}.0" if text.isdigit() else text


def _percent(value: Any) -> str:
    number = _number(value)
    return "–" if math.isnan(number) else f"{100 * number:.1f}"


def _share(value: Any) -> str | None:
    number = _number(value)
    return None if math.isnan(number) else f"{100 * number:.4g} %"


def _spread(mean: Any, deviation: Any) -> str:
    return _percent(mean) + ("" if math.isnan(_number(deviation)) else f" ± {_percent(deviation)}")


def _decimal(value: Any) -> str:
    number = _number(value)
    return "–" if math.isnan(number) else f"{number:,.1f}"


def _megabytes(value: Any) -> str:
    megabytes = _number(value) / 1e6
    if math.isnan(megabytes):
        return "–"
    return f"{megabytes:,.1f}" if megabytes >= 10 else _short(megabytes)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value.is_integer() else _short(value)


def _range(values: Iterable[Any], *, form: Callable[[float], str] = _count) -> str:
    known = [number for number in map(_number, values) if not math.isnan(number)]
    if not known:
        return "–"
    low, high = form(min(known)), form(max(known))
    return low if low == high else f"{low} to {high}"
