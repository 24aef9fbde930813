"""A study from its runs to what people read: tables, figure, findings, and what differs from the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedaux.paper import published
from fedaux.paper.comparison import findings
from fedaux.paper.drawing import drawn
from fedaux.paper.running import CENTRAL, Plan, Request, carry_out, measure, plan
from fedaux.paper.study import Study
from fedaux.paper.tables import BEST, LAST, PRINTED, Line, Table, Text, block_tables, figure, markdown
from fedaux.paper.writing import DIFFERS, TITLES, Outcome, sentence, unfinished_section, write

BEST_COMBINATION = "best combination"
RATES = ("local.learning_rate", "distillation.learning_rate", "local.proximal")
STANDING = (
    "`fedaux` weighs probabilities with the private mechanism `mean`, whose scores are (ε, δ)-private as stated; the "
    "authors' released scoring is not (docs/privacy.md). The printed rule is `--also fedaux+logits`."
)


def run_study(study: Study, request: Request) -> Outcome:
    """Run what is not finished yet under OUT/cells, and write tables and figure into OUT."""
    prepared = plan(study, request)
    unfinished = carry_out(prepared, request, name=study.name)
    numbers = gather(study, prepared, request, unfinished)
    tables = combination_tables(numbers) if study.figure == "heat" else block_tables(numbers)
    return write(
        request.out,
        study.name,
        numbers=numbers,
        markdown=describe(study, numbers, tables),
        figures={study.name: drawn(study.figure, numbers)},
        notes=numbers["notes"],
    )


def gather(study: Study, prepared: Plan, request: Request, unfinished: Sequence[str]) -> dict[str, Any]:
    """Return everything that tables and figures are made from."""
    first = prepared.cells[0].experiment
    return {
        "study": study.name,
        "quick": request.quick,
        "where": published.where(study.name),
        "cut": prepared.grid.cut if request.quick else "",
        "left_open": [] if request.quick else list(study.left_open),
        "notes": [*prepared.notes, *(f"changed for all runs: `{override}`" for override in request.overrides)],
        "unfinished": list(unfinished),
        "blocks": [value.label for value in prepared.grid.blocks.values],
        "columns": [value.label for value in prepared.grid.columns.values],
        "methods": list(prepared.methods),
        "rounds": first.rounds,
        "seeds": sorted({seed for cell in prepared.cells for seed in cell.experiment.seeds}),
        "privacy": {"mechanism": first.certainty.mechanism, **first.certainty.model_dump(include={"epsilon", "delta"})},
        "rows": measure(study, prepared, request.cells),
    }


def describe(study: Study, numbers: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """Return the whole text."""
    quick = numbers["quick"]
    title = f"# {study.name}{TITLES['quick'] if quick else ''}: {study.shows}"
    lines = [f"{title} ({part(numbers)})", ""]
    judged = {**numbers, "rows": combinations(numbers["rows"])} if study.figure == "heat" else numbers
    lines += [f"- {finding}" for finding in findings(judged)]
    privacy = numbers["privacy"]
    seeds = ", ".join(map(str, numbers["seeds"]))
    facts = [
        f"Test accuracy in %, {'mean ± standard deviation over seeds' if len(numbers['seeds']) > 1 else 'seed'} "
        f"{seeds}, {numbers['rounds']} round{'s' if numbers['rounds'] > 1 else ''}; best round (what the paper "
        "reports) and last round.",
        f"Scores: mechanism `{privacy['mechanism']}`, ε = {privacy['epsilon']:g}, δ = {privacy['delta']:g}.",
    ]
    if numbers["where"]:
        facts.append(f"In the paper, {numbers['where']}.")
    lines += ["", " ".join(facts), ""]
    for table in tables:
        lines += [f"## {table.title}", "", markdown(table)]
    different = [STANDING, *numbers["left_open"], *numbers["notes"]]
    if numbers["cut"]:
        different.insert(0, f"Cut for the quick version: {numbers['cut']}.")
    lines += [DIFFERS, "", *(f"- {sentence(line)}" for line in different)]
    return "\n".join(lines) + "\n" + unfinished_section(numbers["unfinished"])


MOST_NAMED = 8
"""Values of an axis that a title names; more are counted."""


def part(numbers: Mapping[str, Any]) -> str:
    """Return in words what was run: how many methods, and which values of both axes."""
    methods = len(numbers["methods"])
    named = [f"{methods} method{'s' if methods > 1 else ''}"]
    for labels in (numbers["blocks"], numbers["columns"]):
        start = labels[0].rpartition(" = ")[0]
        alike = bool(start) and all(label.rpartition(" = ")[0] == start for label in labels)
        combined = any(", " in label for label in labels)
        if combined or len(labels) > MOST_NAMED:
            named.append(f"{len(labels)} {'combinations' if combined else 'columns'}")
        else:
            short = [label.rpartition(" = ")[2] for label in labels] if alike else labels
            named.append((f"{start} = " if alike else "") + ", ".join(short))
    return "; ".join(named)


def combinations(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a block and method: its best combination of settings beside the one that the paper prints."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["method"] != CENTRAL:
            groups.setdefault((row["block"], row["method"]), []).append(row)
    chosen = []
    for (block, method), group in groups.items():
        known = [row for row in group if row["best"] is not None]
        best = max(known, key=lambda row: row["best"]["mean"]) if known else group[0]
        printed = published.tables()["hpo"]["blocks"].get(block, {}).get(method)
        share = None if printed is None else 100 * float(printed[-1])
        chosen.append(
            {
                **best,
                "column": BEST_COMBINATION,
                "published": None if share is None else {"text": f"{share:.2f}", "mean": share},
                "printed_settings": None if printed is None else printed[:-1],
                "runs": sum(row["runs"] for row in group),
                "finished": sum(row["finished"] for row in group),
            }
        )
    return chosen


def combination_tables(numbers: Mapping[str, Any]) -> list[Table]:
    """Return the table of best combinations, a block each, sorted by the accuracy measured."""
    tables = []
    for block in numbers["blocks"]:
        rows = [row for row in combinations(numbers["rows"]) if row["block"] == block]
        rows.sort(key=lambda row: -(row["best"]["mean"] if row["best"] else 0))
        lines: list[Line] = []
        for row in rows:
            if row["published"] and not numbers["quick"]:
                cells = [cell.replace("-", "–") if cell == "-" else cell for cell in row["printed_settings"]]
                lines.append(_combination(row["method"], PRINTED, [*cells, row["published"]["text"]]))
            if row["best"]:
                settings = [f"{row['settings'][key]:g}" if key in row["settings"] else "–" for key in RATES]
                lines.append(_combination(row["method"], BEST, [*settings, figure(row["best"])]))
                lines.append(_combination(row["method"], LAST, [*settings, figure(row["last"])]))
        columns = ("local rate", "distillation rate", "μ", "accuracy")
        tables.append(Table(block, columns, tuple(lines)))
    return tables


def _combination(method: str, kind: str, cells: Sequence[str]) -> Line:
    return Line(method, kind, tuple(Text(cell) for cell in cells))
