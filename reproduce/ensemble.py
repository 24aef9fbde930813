"""How good is the teacher? Accuracy of the ensemble of all clients after one local training from
h0, by weights.

There is no distillation and no further round: this isolates what certainty scores contribute. Local
training is shared by all mechanisms of a split. The ensemble predicts the test images, so the
figures are about the teacher itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaux.config import Experiment
from fedaux.core.compute import choose_device
from fedaux.core.messages import Member, TrainRequest
from fedaux.core.releases import Scorer
from fedaux.core.server import prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.core.soft_labels import Mix, mixture, score_weights
from fedaux.core.task import State, Task, build_models
from fedaux.data import LabelledData, load_both
from fedaux.report.tables import Table
from fedaux.running import preflight as checks
from fedaux.running.run import ExperimentRunner, NullCallback, split_for
from fedaux.running.run_directory import RunDirectory
from reproduce import datasets
from reproduce.document import Context, Document, seeds_text, spread, spread_text

MECHANISMS = ("mean", "released-code", "paper", "none")
MIXES: tuple[Mix, ...] = ("logits", "probabilities")
ALPHAS = (0.01, 0.04, 0.1, 0.16, 0.64, 2.56, 10.24)


def run(
    context: Context, *, alphas: Sequence[float] = ALPHAS, mechanisms: Sequence[str] = MECHANISMS
) -> Document:
    """Measure the ensemble over heterogeneity: plain means, and each mechanism's weights on logits
    and probabilities.

    Seeds, clients and privacy follow the context's experiment.
    """
    experiment = context.experiment
    checks.check(experiment)
    device = choose_device(experiment.engine.device)
    data, auxiliary = load_both(experiment)
    data, auxiliary = data.to(device), auxiliary.to(device)
    checks.check_data(experiment, data, auxiliary)
    rows: list[dict[str, Any]] = []
    for alpha in alphas:
        for seed in experiment.seeds:
            changed = Experiment(**_changed(experiment, "split", alpha=alpha))
            for row in _ensemble_rows(changed, data, auxiliary, seed, mechanisms, context.out):
                rows.append({"alpha": alpha, "seed": seed} | row)
                context.on_line(
                    f"alpha {alpha:g}  seed {seed}  {row['weights']:<24} "
                    f"{100 * row['accuracy']:.1f} %"
                )
    values: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        values.setdefault((row["weights"], row["alpha"]), []).append(row["accuracy"])
    lines = [
        [kind, *(spread_text(spread(values[kind, alpha]), scale=100) for alpha in alphas)]
        for kind in dict.fromkeys(row["weights"] for row in rows)
    ]
    section = experiment.certainty
    return Document(
        "the teacher itself over heterogeneity, by kind of weights",
        {"rows": rows},
        [
            f"{datasets.describe(experiment)} Accuracy of the weighted ensemble of all "
            f"{experiment.split.num_clients} clients on the test images after "
            f"{experiment.local.epochs} local epoch(s) from h0, in %, "
            f"{seeds_text(experiment.seeds)}. Private mechanisms at ({section.epsilon:g}, "
            f"{section.delta:g}); `released-code` and `none` are not private.",
            Table(["weights", *(f"α = {alpha:g}" for alpha in alphas)], lines),
        ],
    )


def _changed(experiment: Experiment, section: str, **changes: Any) -> dict[str, Any]:
    settings = experiment.to_dict()
    return settings | {section: settings[section] | changes}


def _ensemble_rows(
    experiment: Experiment,
    data: LabelledData,
    auxiliary: Tensor,
    seed: int,
    mechanisms: Sequence[str],
    out: Path,
) -> list[dict[str, Any]]:
    parts = split_for(experiment, data, seed)
    logits: dict[int, Tensor] = {}
    rows: list[dict[str, Any]] = []
    for mechanism in mechanisms:
        changed = Experiment(**_changed(experiment, "certainty", mechanism=mechanism))
        runner = ExperimentRunner(
            changed, RunDirectory(out, experiment), data, auxiliary, NullCallback()
        )
        task = runner.task("fedaux", seed)
        clients = SimulatedClients(task, data.images, data.labels, parts)
        began = time.perf_counter()
        state, preparation = prepare(
            task, clients, extractor=runner.extractor(task), callback=NullCallback()
        )
        if not logits:
            logits = _local_logits(task, clients, state)
            members = [Member(one, "", 1, {}, logits=logits[one]) for one in sorted(logits)]
            equal = torch.full((len(members), 1), 1.0 / len(members))
            for name in MIXES:
                labels = mixture(members, equal, of=name)
                rows.append({"weights": f"plain {name}", "accuracy": _accuracy(labels, task)})
        scorer = Scorer(task, preparation)
        projected = {name: scorer.project(name, task.test_images) for name in preparation.public}
        scores = scorer.log_scores(state.releases, sorted(logits), projected)
        weights = score_weights(members, scores)
        for name in MIXES:
            rows.append(
                {
                    "weights": f"{mechanism} {name}",
                    "accuracy": _accuracy(mixture(members, weights, of=name), task),
                    "release_seconds": preparation.seconds["release"],
                    "all_seconds": time.perf_counter() - began,
                }
            )
    return rows


def _local_logits(task: Task, clients: SimulatedClients, state: State) -> dict[int, Tensor]:
    """Train every client once from the starting model; return its logits on the test images."""
    predictors = {name: task.backend.predictor(model) for name, model in build_models(task).items()}
    request = TrainRequest(1, state.models, task.experiment.local, 0.0, task.seed)
    batch_size = task.experiment.evaluation.batch_size
    return {
        update.client: predictors[task.prototype_of[update.client]](
            update.weights, task.test_images, batch_size=batch_size
        )
        for update in clients.train(clients.present(), request)
    }


def _accuracy(labels: Tensor, task: Task) -> float:
    return float((labels.argmax(dim=1) == task.test_labels).double().mean())
