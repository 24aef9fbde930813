"""The page of a study: tables, figure, findings, and differences from the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedaux.report.latex import sentence
from fedaux.report.tables import Table
from fedaux.sweep import sweep
from reproduce import published
from reproduce.comparison import findings
from reproduce.document import (
    DIFFERS,
    Document,
    Items,
    Outcome,
    Version,
    epsilon_text,
    seeds_text,
    spread_text,
    unfinished,
    write,
)
from reproduce.planning import CENTRAL, Plan, Request, measure, plan, without_result
from reproduce.study import Study
from reproduce.study_figures import drawn

PUBLISHED, BEST, LAST, APART = "published", "best round", "last round", "best less published"
BEST_COMBINATION = "best combination"
RATES = ("local.learning_rate", "distillation.learning_rate", "local.proximal")
STANDING = (
    "`fedaux` weights probabilities with the private mechanism `mean`, whose scores are (ε, "
    "δ)-private as stated; the authors' released scoring is not (docs/proofs.md). The printed "
    "rule is `--also fedaux+logits`."
)
MOST_NAMED = 8
"""Values of an axis that a title names; more are counted."""


def run_study(study: Study, request: Request) -> Outcome:
    """Run the unfinished cells under OUT/cells, and write tables and figure into OUT."""
    prepared = plan(study, request)
    swept = sweep(prepared.cells, request.cells, name=study.name, resume=True, **request.sweeping)
    numbers = gather(study, prepared, request, without_result(swept))
    version: Version = "quick" if request.quick else "paper"
    return write(
        describe(study, numbers), request.out, study.name, version=version, notes=numbers["notes"]
    )


def gather(
    study: Study, prepared: Plan, request: Request, unfinished_runs: Sequence[str]
) -> dict[str, Any]:
    """Return the numbers for tables and figures."""
    first = prepared.cells[0].experiment
    return {
        "study": study.name,
        "quick": request.quick,
        "where": published.where(study.name),
        "cut": prepared.grid.cut if request.quick else "",
        "left_open": [] if request.quick else list(study.left_open),
        "notes": [
            *prepared.notes,
            *(f"changed for all runs: `{override}`" for override in request.overrides),
        ],
        "unfinished": list(unfinished_runs),
        "blocks": [value.label for value in prepared.grid.blocks.values],
        "columns": [value.label for value in prepared.grid.columns.values],
        "methods": list(prepared.methods),
        "rounds": first.rounds,
        "seeds": sorted({seed for cell in prepared.cells for seed in cell.experiment.seeds}),
        "privacy": {
            "mechanism": first.certainty.mechanism,
            **first.certainty.model_dump(include={"epsilon", "delta"}),
        },
        "rows": measure(study, prepared, request.cells),
    }


def describe(study: Study, numbers: Mapping[str, Any]) -> Document:
    """Return the page of a study."""
    searched = study.figure == "heat"
    judged = {**numbers, "rows": best_combinations(numbers["rows"])} if searched else numbers
    privacy, rounds = numbers["privacy"], numbers["rounds"]
    facts = [
        f"Test accuracy in %, {seeds_text(numbers['seeds'])}, {rounds} "
        f"round{'s' if rounds > 1 else ''}; best round (what the paper reports) and last round.",
        f"Scores: mechanism `{privacy['mechanism']}`, {epsilon_text(privacy['epsilon'])}, δ = "
        f"{privacy['delta']:g}.",
        f"In the paper, {numbers['where']}." if numbers["where"] else "",
    ]
    cut = [f"Cut for the quick version: {numbers['cut']}."] if numbers["cut"] else []
    different = [*cut, STANDING, *numbers["left_open"], *numbers["notes"]]
    return Document(
        f"{study.shows} ({scope(numbers)})",
        numbers,
        [
            Items(findings(judged)),
            " ".join(filter(None, facts)),
            *(combination_tables(numbers) if searched else block_tables(numbers)),
            Items([sentence(line) for line in different], DIFFERS),
            *unfinished(numbers["unfinished"]),
        ],
        {study.name: drawn(study.figure, numbers)},
    )


def scope(numbers: Mapping[str, Any]) -> str:
    """Return the number of methods and the values of both axes."""
    methods = len(numbers["methods"])
    named = [f"{methods} method{'s' if methods > 1 else ''}"]
    for labels in (numbers["blocks"], numbers["columns"]):
        starts, ends = zip(*(label.rpartition(" = ")[::2] for label in labels), strict=True)
        combined = any(", " in label for label in labels)
        if combined or len(labels) > MOST_NAMED:
            named.append(f"{len(labels)} {'combinations' if combined else 'columns'}")
        elif starts[0] and len(set(starts)) == 1:
            named.append(f"{starts[0]} = {', '.join(ends)}")
        else:
            named.append(", ".join(labels))
    return "; ".join(named)


def block_tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Return one table per block: the published figure, the best and the last round of each
    method."""
    columns, quick = numbers["columns"], numbers["quick"]
    kinds = {PUBLISHED: "published", BEST: "best", LAST: "last"}
    if quick:
        del kinds[PUBLISHED]
    if numbers["rounds"] == 1:
        del kinds[LAST]
    tables = []
    for block in numbers["blocks"]:
        rows = [
            row for row in numbers["rows"] if row["block"] == block and row["method"] != CENTRAL
        ]
        at = {(row["method"], row["column"]): row for row in rows}
        lines: list[list[str]] = []
        bold: set[tuple[int, int]] = set()
        for method in numbers["methods"]:
            cells = [at.get((method, column)) for column in columns]
            for kind, key in kinds.items():
                if any(row and row[key] for row in cells):
                    best = {n + 2 for n, row in enumerate(cells) if is_best(row, key, rows)}
                    bold |= {(len(lines), column) for column in best}
                    lines.append([method, kind, *(_figure(row, key) for row in cells)])
            gaps = [difference(row) for row in cells]
            if not quick and any(gap is not None for gap in gaps):
                shown = ("–" if gap is None else f"{gap:+.1f}" for gap in gaps)
                lines.append([method, APART, *shown])
        headers = ("method", "figure", *columns)
        tables.append(Table(headers, lines, caption=block, bold=bold))
    if central := [row for row in numbers["rows"] if row["method"] == CENTRAL and row["best"]]:
        lines = [
            [row["block"], kind, spread_text(row[key])]
            for row in central
            for kind, key in ((BEST, "best"), (LAST, "last"))
        ]
        headers = ("network", "figure", "accuracy")
        tables.append(Table(headers, lines, caption="Centralised training"))
    return tables


def _figure(row: Mapping[str, Any] | None, key: str) -> str:
    if row is None or row[key] is None:
        return "–"
    return str(row[key]["text"]) if key == "published" else spread_text(row[key])


def is_best(row: Mapping[str, Any] | None, key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a figure is the best of several in its column."""
    if row is None or row[key] is None:
        return False
    peers = [
        other[key]["mean"] for other in rows if other["column"] == row["column"] and other[key]
    ]
    return len(peers) > 1 and row[key]["mean"] >= max(peers)


def difference(row: Mapping[str, Any] | None) -> float | None:
    """Return measured less published accuracy of the best round, in points."""
    if row is None or row["best"] is None or row["published"] is None:
        return None
    return float(row["best"]["mean"] - row["published"]["mean"])


def best_combinations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per block and method: its best combination of settings beside the paper's."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["method"] != CENTRAL:
            groups.setdefault((row["block"], row["method"]), []).append(row)
    chosen = []
    for (block, method), group in groups.items():
        *settings, share = published.tables()["hpo"]["blocks"].get(block, {}).get(method, [None])
        accuracy = None if share is None else 100 * float(share)
        chosen.append(
            {
                **max(group, key=lambda row: row["best"]["mean"] if row["best"] else 0),
                "column": BEST_COMBINATION,
                "published": None
                if accuracy is None
                else {"text": f"{accuracy:.2f}", "mean": accuracy},
                "published_settings": settings,
                "runs": sum(row["runs"] for row in group),
                "finished": sum(row["finished"] for row in group),
            }
        )
    return chosen


def combination_tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Return one table of best combinations per block, sorted by the measured accuracy."""
    tables = []
    for block in numbers["blocks"]:
        rows = [row for row in best_combinations(numbers["rows"]) if row["block"] == block]
        lines: list[list[str]] = []
        for row in sorted(rows, key=lambda row: -(row["best"]["mean"] if row["best"] else 0)):
            if row["published"] and not numbers["quick"]:
                settings = ["–" if cell == "-" else cell for cell in row["published_settings"]]
                lines.append([row["method"], PUBLISHED, *settings, row["published"]["text"]])
            if row["best"]:
                settings = [
                    f"{row['settings'][key]:g}" if key in row["settings"] else "–" for key in RATES
                ]
                lines.append([row["method"], BEST, *settings, spread_text(row["best"])])
                lines.append([row["method"], LAST, *settings, spread_text(row["last"])])
        headers = ["method", "figure", "local rate", "distillation rate", "μ", "accuracy"]
        tables.append(Table(headers, lines, caption=block))
    return tables
