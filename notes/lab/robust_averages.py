"""What robust averages cost without an attack, and save when one client of ten is hostile.

usage: python notes/lab/robust_averages.py OUT   (about 15 minutes on one core; OUT keeps finished runs)

The demo (embedded digits, letters as public data, 5 rounds, all ten clients in every round), alpha 0.01 and 100,
seeds 0 to 2. Client 0 is hostile. It releases certainty like everybody else, and sends in every round
zeros: a model of zeros; flipped: theta - d; scaled: theta + 10 d; both: theta - 10 d, for the server's theta and
its own honest update d. It states its true number of examples. "absent": client 0 sends nothing, what a perfect
defence could reach.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedaux.core.messages import TrainRequest, Update, Weights
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import Task
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.run import NullCallback, load_inputs, run_with_clients, split_for

RULES = ("mean", "clipped", "trimmed-mean", "median")
ATTACKS: dict[str, float | None] = {"none": 1.0, "zeros": None, "flipped": -1.0, "scaled": 10.0, "both": -10.0}
METHODS = ("fedavg+p", "fedaux")


class Hostile(SimulatedClients):
    """Simulated clients of which client 0 changes its updates."""

    attack = "none"

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        for update in super().train(clients, request):
            if update.client == 0 and self.attack == "absent":
                continue
            if update.client == 0 and self.attack != "none":
                before = request.weights[self._task.prototype_of[0]]
                update = replace(update, weights=changed(update.weights, before, ATTACKS[self.attack]))
            yield update


def changed(weights: Weights, before: Weights, factor: float | None) -> Weights:
    """Return theta + factor (theta_0 - theta), or zeros."""
    if factor is None:
        return {name: own.zero_() if own.is_floating_point() else own for name, own in weights.items()}
    return {
        name: before[name] + factor * (own - before[name]) if own.is_floating_point() else own
        for name, own in weights.items()
    }


def accuracies(out: Path, *, rule: str, attack: str, alpha: float) -> dict[str, list[float]]:
    """Return the last accuracies of each method over the seeds, in per cent."""
    file = out / f"{alpha:g}-{rule}-{attack}"
    if not (file / "summary.json").exists():
        settings = [f"split.alpha={alpha}", f"aggregation={rule}", "engine.device=cpu", "engine.threads=1"]
        settings += [f"method={json.dumps(METHODS)}"]
        experiment = load_experiment(find_recipe("demo"), overrides=settings)
        inputs = load_inputs(experiment)

        def clients(task: Task) -> SimulatedClients:
            parts = split_for(experiment, inputs.data, task.seed)
            made = Hostile(task, inputs.data.images, inputs.data.labels, parts)
            made.attack = attack
            return made

        run_with_clients(experiment, inputs, clients, path=file, resume=file.exists(), callback=NullCallback())
    rows = [json.loads(line) for line in (file / "metrics.jsonl").read_text().splitlines()]
    last = max(row["round"] for row in rows)
    return {
        method: [100 * row["accuracy"] for row in rows if row["method"] == method and row["round"] == last]
        for method in METHODS
    }


def table(out: Path, progress: Callable[[str], Any] = print) -> None:
    """Print one row per alpha, method and rule, one column per attack."""
    cells: dict[tuple[float, str, str, str], str] = {}
    for alpha in (0.01, 100.0):
        for rule in RULES:
            for attack in (*ATTACKS, *(("absent",) if rule == "mean" else ())):
                found: Mapping[str, list[float]] = accuracies(out, rule=rule, attack=attack, alpha=alpha)
                for method, own in found.items():
                    cells[alpha, method, rule, attack] = f"{mean(own):.1f} ± {stdev(own):.1f}"
                progress(f"{alpha:g} {rule} {attack}: {found}")
    print("| alpha | method | aggregation | " + " | ".join((*ATTACKS, "absent")) + " |")
    print("|" + "---|" * (4 + len(ATTACKS)))
    for alpha in (0.01, 100.0):
        for method in METHODS:
            for rule in RULES:
                row = [cells.get((alpha, method, rule, attack), "") for attack in (*ATTACKS, "absent")]
                print(f"| {alpha:g} | `{method}` | `{rule}` | " + " | ".join(row) + " |")


if __name__ == "__main__":
    table(Path(sys.argv[1]))
