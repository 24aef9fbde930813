"""How good is the teacher? Accuracy of the ensemble of all clients after one local training from h0, by weights.

No distillation and no further rounds: this isolates what certainty scores contribute. Local training is shared by all
mechanisms of a split. Test images play the distill set's part, so the figures are about the teacher itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaux.config import Experiment
from fedaux.core.messages import TrainRequest
from fedaux.core.preparation import Scorer, prepare
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import State, Task, build_models
from fedaux.core.teachers import Ensemble, Member, certainty_teacher, mean_teacher, mixture_teacher
from fedaux.data import LabelledData, load_both
from fedaux.fast.inference import Predictor
from fedaux.paper import places
from fedaux.paper.study import quick_base
from fedaux.paper.writing import TITLES, Outcome, Version, markdown_table, write
from fedaux.running import preflight as checks
from fedaux.running.run import Silent, Work, choose_device, split_for
from fedaux.running.run_directory import RunDirectory

MECHANISMS = ("mean", "release", "paper", "none")
ALPHAS = (0.01, 0.04, 0.1, 0.16, 0.64, 2.56, 10.24)


def run(
    out: Path | str,
    *,
    base: Experiment | None = None,
    alphas: Sequence[float] = ALPHAS,
    mechanisms: Sequence[str] = MECHANISMS,
    version: Version = "own",
    notes: Sequence[str] = (),
    on_line: Callable[[str], None] = print,
) -> Outcome:
    """Measure the ensemble over heterogeneity: plain means, and each mechanism's weights on logits and probabilities.

    Without ``base``, the embedded demo. Seeds, clients and privacy are those of the base.
    """
    experiment, version = (quick_base("ensemble"), "quick") if base is None else (base, version)
    checks.check(experiment)
    device = choose_device(experiment.engine.device)
    data, auxiliary = load_both(experiment)
    data, auxiliary = data.to(device), auxiliary.to(device)
    checks.check_data(experiment, data, auxiliary)
    measured: list[dict[str, Any]] = []
    for alpha in alphas:
        for seed in experiment.seeds:
            settings = experiment.to_dict()
            settings["split"]["alpha"] = alpha
            for row in _ensemble_rows(Experiment(**settings), data, auxiliary, seed, mechanisms, Path(out)):
                measured.append({"alpha": alpha, "seed": seed} | row)
                on_line(f"alpha {alpha:g}  seed {seed}  {row['weights']:<24} {100 * row['accuracy']:.1f} %")
    kinds = list(dict.fromkeys(row["weights"] for row in measured))
    table = [[kind, *(_cell(measured, kind, alpha) for alpha in alphas)] for kind in kinds]
    section = experiment.certainty
    seeds = ", ".join(map(str, experiment.seeds))
    over = f"mean ± standard deviation over seeds {seeds}" if len(experiment.seeds) > 1 else f"seed {seeds}"
    text = (
        f"# ensemble{TITLES[version]}: the teacher itself over heterogeneity, by kind of weights\n\n"
        f"{places.told(experiment)} "
        f"Accuracy of the weighted ensemble of all {experiment.split.num_clients} clients on the test images after "
        f"{experiment.local.epochs} local epoch(s) from h0, in %, {over}. Private mechanisms at "
        f"({section.epsilon:g}, {section.delta:g}); `release` and "
        "`none` are not private.\n\n" + markdown_table(["weights", *(f"α = {alpha:g}" for alpha in alphas)], table)
    )
    return write(
        Path(out), "ensemble", numbers={"version": version, "rows": measured}, markdown=text, figures={}, notes=notes
    )


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
        settings = experiment.to_dict()
        settings["certainty"]["mechanism"] = mechanism
        work = Work(Experiment(**settings), RunDirectory(out, experiment), data, auxiliary, Silent())
        task = work.task("fedaux", seed)
        clients = SimulatedClients(task, data.images, data.labels, parts)
        began = time.perf_counter()
        state, preparation = prepare(task, clients, extractor=work.extractor(task), watcher=Silent())
        seconds = preparation.seconds["certify"]
        if not logits:
            logits = _local_logits(task, clients, state)
            ensemble = _ensemble(logits, {})
            rows.append({"weights": "plain logits", "accuracy": _accuracy(mean_teacher(ensemble), task)})
            equal = _ensemble(logits, {client: torch.zeros_like(output[:, 0]) for client, output in logits.items()})
            rows.append({"weights": "plain probabilities", "accuracy": _accuracy(mixture_teacher(equal), task)})
        scorer = Scorer(task, preparation)
        projected = {
            name: scorer.project(name, preparation.extractors[name], task.test_images) for name in preparation.public
        }
        chosen = sorted(logits)
        scores = dict(zip(chosen, scorer.log_scores(state.certificates, chosen, projected), strict=True))
        ensemble = _ensemble(logits, scores)
        for name, teacher in (("logits", certainty_teacher), ("probabilities", mixture_teacher)):
            rows.append(
                {
                    "weights": f"{mechanism} {name}",
                    "accuracy": _accuracy(teacher(ensemble), task),
                    "certify_seconds": seconds,
                    "all_seconds": time.perf_counter() - began,
                }
            )
    return rows


def _local_logits(task: Task, clients: SimulatedClients, state: State) -> dict[int, Tensor]:
    """Train every client once from the starting model; return its logits on the test images."""
    predictors = {name: Predictor(model, task.compute) for name, model in build_models(task).items()}
    request = TrainRequest(1, state.weights, task.experiment.local, 0.0, task.seed)
    logits = {}
    for update in clients.train(clients.present(), request):
        predictor = predictors[task.prototype_of[update.client]]
        batch_size = task.experiment.evaluation.batch_size
        logits[update.client] = predictor(update.weights, task.test_images, batch_size=batch_size)
    return logits


def _ensemble(logits: Mapping[int, Tensor], scores: Mapping[int, Tensor]) -> Ensemble:
    members = [Member(client, "", 1, {}) for client in sorted(logits)]
    return Ensemble(
        members,
        predict=lambda member: logits[member.client],
        log_scores=lambda chosen: torch.stack([scores[client] for client in chosen]),
    )


def _accuracy(labels: Tensor, task: Task) -> float:
    return float((labels.argmax(dim=1) == task.test_labels).double().mean())


def _cell(measured: Sequence[Mapping[str, Any]], kind: str, alpha: float) -> str:
    values = [100 * row["accuracy"] for row in measured if (row["weights"], row["alpha"]) == (kind, alpha)]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"
