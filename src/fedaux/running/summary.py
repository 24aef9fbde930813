"""The summary of a run: one row per method, over its seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedaux.config import Experiment
from fedaux.core.algorithms import all_asks
from fedaux.core.asks import SHARED_PHASES, sends_plain_updates
from fedaux.formatting import over_seeds
from fedaux.privacy.accounting import total_cost
from fedaux.privacy.ledger import UPDATE, LedgerEntry, worst_client


def summarise(experiment: Experiment, headers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return summary.json: accuracy of the last round and maximum over rounds, privacy, time,
    bytes.

    The standard deviation over seeds uses n - 1, and is 0 for a single seed. The paper reports the
    maximum over rounds, which is selected on test data; the last round is not. The seconds of a
    method exclude h0 and features, which methods share: `shared_seconds` of the run.
    """
    rows = []
    protected = not sends_plain_updates(all_asks(experiment).values(), experiment)
    for method in experiment.method:
        cells = [header for header in headers if header["method"] == method and header["rows"]]
        if cells:
            rows.append({"method": method} | _row(cells, protected=protected))
    finished = sum(header["round"] >= experiment.rounds for header in headers)
    return {
        "name": experiment.name,
        "rows": rows,
        "seeds": list(experiment.seeds),
        "rounds": experiment.rounds,
        "shared_seconds": round(sum(_seconds(header, shared=True) for header in headers), 3),
        "complete": finished == len(experiment.method) * len(experiment.seeds),
        "config_sha256": experiment.sha256(),
    }


def _row(cells: Sequence[Mapping[str, Any]], *, protected: bool) -> dict[str, Any]:
    measured = [
        [row["accuracy"] for row in cell["rows"] if row["accuracy"] is not None] for cell in cells
    ]
    last = over_seeds([accuracies[-1] for accuracies in measured if accuracies])
    best = over_seeds([max(accuracies) for accuracies in measured if accuracies])
    entries = [[LedgerEntry.from_json(entry) for entry in cell["ledger"]] for cell in cells]
    costs = [worst_client(cell, accountant=total_cost) for cell in entries]
    spent = max((cost for cost in costs if cost is not None), default=None)
    return {
        "seeds_done": len(cells),
        "accuracy_mean": last[0],
        "accuracy_std": last[1],
        "accuracy_max_mean": best[0],
        "accuracy_max_std": best[1],
        "epsilon": None if spent is None else "inf" if math.isinf(spent[0]) else spent[0],
        "delta": None if spent is None else spent[1],
        "mechanism": next(
            (entry.mechanism for cell in entries for entry in cell if entry.purpose != UPDATE), None
        ),
        "updates_protected": protected,
        "seconds": statistics.fmean(_seconds(cell, shared=False) for cell in cells),
        "bytes_up": _mean_of_total(cells, "bytes_up"),
        "bytes_down": _mean_of_total(cells, "bytes_down"),
    }


def _seconds(cell: Mapping[str, Any], *, shared: bool) -> float:
    """Return the seconds of a method and seed in the phases that methods share, or in the rest."""
    tables = [cell["preparation"]["seconds"], *(row["seconds"] for row in cell["rows"])]
    own = (
        float(seconds)
        for table in tables
        for phase, seconds in table.items()
        if (phase in SHARED_PHASES) == shared
    )
    return round(sum(own), 3)


def _mean_of_total(cells: Sequence[Mapping[str, Any]], key: str) -> int:
    return round(
        statistics.fmean(
            cell["preparation"][key] + sum(row[key] for row in cell["rows"]) for cell in cells
        )
    )
