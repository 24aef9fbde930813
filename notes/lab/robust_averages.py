"""What robust averages cost without an attack, and save when one client of ten is hostile.

usage: python notes/lab/robust_averages.py OUT [full|linear] [METHOD ...]   (results are appended to OUT/results.jsonl)

The demo (embedded digits, letters as public data, 5 rounds, all ten clients in every round), alpha 0.01 and 100,
seeds 0 to 2. Client 0 is hostile. It releases certainty like everybody else, and sends in every round
zeros: a model of zeros; flipped: theta - d; scaled: theta - 10 d, for the server's theta and its own honest update d. It states its true number of examples.
claimed: zeros, with a claim that counts as many examples as all others together, the most that `federation.largest_share` lets pass.
"absent": client 0 sends nothing, what a perfect defence could reach.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedaux.core.messages import TrainRequest, Update, Weights
from fedaux.core.preparation import prepare
from fedaux.core.round import Federation
from fedaux.core.simulation import SimulatedClients
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.run import ExperimentRunner, NullCallback, load_inputs, split_for
from fedaux.running.run_directory import RunDirectory

RULES = ("mean", "clipped", "trimmed-mean", "median")
ATTACKS: dict[str, float | None] = {
    "none": 1.0, "zeros": None, "claimed": None, "flipped": -1.0, "scaled": -10.0
}
WITH_WHOLE_NETWORKS = ("none", "claimed", "scaled")
METHODS = ("fedavg+p", "fedaux2")


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
                if self.attack == "claimed":
                    update = replace(update, num_examples=sum(map(len, self._parts[1:])))
            yield update


def changed(weights: Weights, before: Weights, factor: float | None) -> Weights:
    """Return theta + factor (theta_0 - theta), or zeros."""
    if factor is None:
        return {name: own.zero_() if own.is_floating_point() else own for name, own in weights.items()}
    return {
        name: before[name] + factor * (own - before[name]) if own.is_floating_point() else own
        for name, own in weights.items()
    }


def measure(out: Path, *, mode: str, alpha: float, seed: int, method: str) -> Iterator[dict[str, Any]]:
    """Yield the last accuracy of every rule under every attack, all from one preparation."""
    settings = [f"split.alpha={alpha}", f"seeds=[{seed}]", "engine.device=cpu", "engine.threads=1"]
    settings += [f"mode={mode}"]
    experiment = load_experiment(find_recipe("demo"), overrides=settings)
    inputs = load_inputs(experiment)
    parts = split_for(experiment, inputs.data, seed)
    with RunDirectory.open(out / f"{alpha:g}-{seed}-{method}", experiment, resume=False) as directory:
        runner = ExperimentRunner(
            experiment, directory, inputs.data, inputs.auxiliary, NullCallback(), inputs.compute
        )
        task = runner.task(method, seed)
        clients = Hostile(task, inputs.data.images, inputs.data.labels, parts)
        start, preparation = prepare(task, clients, extractor=runner.extractor(task), callback=NullCallback())
        for rule in RULES:
            own = replace(task, experiment=experiment.model_copy(update={"aggregation": rule}))
            attacks = ATTACKS if mode == "linear" else WITH_WHOLE_NETWORKS
            for attack in (*attacks, *(("absent",) if rule == "mean" else ())):
                clients.attack = attack
                server, state = Federation(own, preparation, clients, callback=NullCallback()), start
                for _ in range(experiment.rounds):
                    state, row = server.play_round(state)
                found = {"alpha": alpha, "seed": seed, "method": method, "rule": rule, "attack": attack}
                yield found | {"accuracy": 100 * row["accuracy"]}


def table(rows: Sequence[dict[str, Any]]) -> None:
    """Print one row per alpha, method and rule, one column per attack."""
    columns = (*ATTACKS, "absent")
    print("| alpha | method | aggregation | " + " | ".join(columns) + " |")
    print("|" + "---|" * (3 + len(columns)))
    for alpha in (0.01, 100.0):
        for method in sorted({row["method"] for row in rows}):
            for rule in RULES:
                cells = []
                for attack in columns:
                    wanted = {"alpha": alpha, "method": method, "rule": rule, "attack": attack}
                    own = [row["accuracy"] for row in rows if wanted.items() <= row.items()]
                    cells.append(f"{mean(own):.1f} ± {stdev(own):.1f}" if len(own) > 1 else "")
                print(f"| {alpha:g} | `{method}` | `{rule}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    folder, mode, methods = Path(sys.argv[1]), (sys.argv[2:] or ["full"])[0], tuple(sys.argv[3:]) or METHODS
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.jsonl").open("a") as file:
        for seed in range(3):
            for alpha in (0.01, 100.0):
                for method in methods:
                    for row in measure(folder, mode=mode, alpha=alpha, seed=seed, method=method):
                        file.write(json.dumps(row) + "\n")
                        file.flush()
    table([json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()])
