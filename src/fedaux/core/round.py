"""The federation as the server sees it: one round after another, written once over `Clients`.

State is a value: a round takes one and returns the next, so a checkpoint is a state and resuming is going on from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.messages import Clients, Stamped, TrainRequest, Update, Weights, problem_of
from fedaux.core.methods import Method
from fedaux.core.preparation import Scorer, certify
from fedaux.core.server_model import Student
from fedaux.core.task import Clock, Preparation, State, Task, Watcher, extract, trained_models
from fedaux.core.teachers import Member
from fedaux.core.teaching import NO_NUMBERS, teach
from fedaux.core.weights import average, evaluate
from fedaux.privacy.ledger import LedgerEntry

if TYPE_CHECKING:
    from fedaux.models import SplitModel

DIVERGED = "the round's model predicts NaN or infinity; a learning rate may be too high"


class Federation:
    """The server of one task: what a round needs besides its state."""

    def __init__(self, task: Task, preparation: Preparation, clients: Clients, *, watcher: Watcher) -> None:
        self.task = task
        self.preparation = preparation
        self.scorer = Scorer(task, preparation)
        self.students = {name: self._student(name, model) for name, model in trained_models(task).items()}
        self._clients = clients
        self._watcher = watcher

    def _student(self, prototype: str, model: SplitModel) -> Student:
        """Return the server's side of a prototype; in linear mode it works on features, computed here once for all."""
        task = self.task

        def inputs(images: Tensor) -> Tensor:
            if task.experiment.mode == "full":
                return images
            return extract(task, prototype, self.preparation.extractors[prototype], images)

        validation = None if task.validation is None else (inputs(task.validation[0]), task.validation[1])
        return Student(
            model,
            experiment=task.experiment,
            backend=task.backend,
            architecture=task.architecture(prototype),
            distill_inputs=inputs(task.distill_images),
            test_inputs=inputs(task.test_images),
            validation=validation,
        )

    def play_round(self, state: State) -> tuple[State, dict[str, Any]]:
        """Carry out one round (Algorithm 2): select, train, average, teach, distill, evaluate."""
        task, experiment = self.task, self.task.experiment
        number = state.round + 1
        clock = Clock(task, number, self._watcher)
        bytes_up = bytes_down = 0
        present = self._clients.present()
        chosen = select(
            present,
            count=clients_a_round(experiment),
            generator=seeding.generator(task.seed, "selection", round=number),
        )
        certificates = dict(state.certificates)
        dropped: dict[int, str] = {}
        wasted: list[LedgerEntry] = []
        newcomers = [client for client in chosen if task.method.scores and client not in certificates]
        if newcomers:
            with clock.phase("certify"):
                late, wasted, bytes_down, bytes_up = certify(
                    task,
                    self._clients,
                    newcomers,
                    extractors=self.preparation.extractors,
                    public=self.preparation.public,
                )
            certificates |= late
            reasons = self._clients.reasons()
            dropped = {
                client: f"no certainty release: {reasons[client]}" if client in reasons else "no certainty release"
                for client in newcomers
                if client not in late
            }
        asked = [client for client in chosen if client not in dropped]
        with clock.phase("train"):
            proximal = experiment.local.proximal if task.method.proximal else 0.0
            frozen = self.preparation.extractors if experiment.mode == "linear" else {}
            wire = experiment.federation.wire
            request = TrainRequest(number, state.weights, experiment.local, proximal, task.seed, frozen, wire)
            updates, unusable, spent = self._collect(asked, request)
            dropped |= unusable
            bytes_down += sum(request.num_bytes(task.prototype_of[client]) for client in asked)
            bytes_up += sum(update.num_bytes(wire=wire) for update in updates)
            members = [Member(u.client, task.prototype_of[u.client], u.num_examples, u.weights) for u in updates]
            dropped |= dict.fromkeys(self._without_numbers(members), NO_NUMBERS)
            members = [member for member in members if member.client not in dropped]
        weights, memory = dict(state.weights), dict(state.memory)
        if members:
            absent = absent_members(task, memory, number=number, answered=[member.client for member in members])
            with clock.phase("average"):
                weights |= average_by_prototype([*members, *absent])
            predictions: Mapping[int, Tensor] = {}
            if task.method.teacher is not None:
                with clock.phase("teach"):
                    lesson = teach(
                        members,
                        absent if "predictions" in task.method.memory else [],
                        method=task.method,
                        experiment=experiment,
                        students=self.students,
                        memory=memory,
                        log_scores=lambda ids: self.scorer.log_scores(certificates, ids),
                        generator=lambda: seeding.generator(task.seed, "bayesian", round=number),
                        num_classes=task.num_classes,
                    )
                    predictions = lesson.predictions
                if lesson.unusable:  # who does not teach is not averaged in, either
                    dropped |= lesson.unusable
                    members = [member for member in members if member.client not in dropped]
                    weights = dict(state.weights) | average_by_prototype([*members, *absent] if members else [])
                if lesson.targets is not None:
                    with clock.phase("distill"):
                        weights = self._distill(weights, lesson.targets, number)
            if experiment.batch_normalisation.server == "auxiliary":
                with clock.phase("statistics"):
                    weights = {
                        name: student.with_public_statistics(weights[name]) for name, student in self.students.items()
                    }
            if not self._can_go_on(weights):
                dropped |= dict.fromkeys((member.client for member in members), DIVERGED)
                weights, members = dict(state.weights), []
            memory |= {
                member.client: remembered(member, predictions, task.method, number)
                for member in members
                if task.method.memory
            }
        answered = [member.client for member in members]
        losses = [update.loss for update in updates if update.client in answered and update.loss is not None]
        row: dict[str, Any] = {
            "method": task.method.name,
            "seed": task.seed,
            "round": number,
            "accuracy": None,
            "loss": None,
            "accuracy_by_prototype": {},
            "accuracy_ensemble": None,
            "local_loss": float(np.mean(losses)) if losses else None,
            "clients_asked": chosen,
            "clients_answered": answered,
            "clients_dropped": {str(client): reason for client, reason in sorted(dropped.items())},
            "clients_absent": sorted(set(range(experiment.split.num_clients)) - set(present)),
            "clients_remembered": sorted(set(memory) - set(answered)) if answered else [],
            "model_kept": not answered,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
        }
        if number % experiment.evaluation.every == 0 or number == experiment.rounds:
            with clock.phase("evaluate"):
                row |= self.evaluate(weights)
        row["seconds"] = dict(clock.seconds)
        self._watcher.round(row)
        return State(number, weights, certificates, (*state.ledger, *wasted, *spent), memory), row

    def _without_numbers(self, members: Sequence[Member]) -> list[int]:
        """Return the clients whose models predict NaN or infinity on a few public examples."""
        groups = {name: [member for member in members if member.prototype == name] for name in self.students}
        asked = [member for own in groups.values() for member in own]
        flags = [
            self.students[name].predict_numbers([member.weights for member in own])
            for name, own in groups.items()
            if own
        ]
        found = torch.cat(flags).tolist() if flags else []  # one wait for the device
        return [member.client for member, fine in zip(asked, found, strict=True) if not fine]

    def _can_go_on(self, weights: Mapping[str, Weights]) -> bool:
        """Say whether every server model predicts numbers: clients that train from another one are lost for good."""
        flags = [student.predict_numbers([weights[name]]) for name, student in self.students.items()]
        return bool(torch.cat(flags).all())

    def _distill(self, weights: Mapping[str, Weights], targets: Tensor, number: int) -> dict[str, Weights]:
        """Distill every prototype's averaged model on the same soft labels."""
        distilled = {}
        for name, student in self.students.items():
            generator = seeding.generator(self.task.seed, "distillation", round=number, part=name)
            distilled[name] = student.distill(weights[name], targets, generator=generator)
        return distilled

    def evaluate(self, weights: Mapping[str, Weights]) -> dict[str, Any]:
        """Measure the server models on the test data: their mean, each prototype's, and their ensemble's."""
        logits = {name: student.test_logits(weights[name]) for name, student in self.students.items()}
        measured = {name: evaluate(output, self.task.test_labels) for name, output in logits.items()}
        together = torch.stack(list(logits.values())).mean(dim=0)
        return {
            "accuracy": float(np.mean([accuracy for accuracy, _ in measured.values()])),
            "loss": loss if math.isfinite(loss := float(np.mean([loss for _, loss in measured.values()]))) else None,
            "accuracy_by_prototype": {name: accuracy for name, (accuracy, _) in measured.items()},
            "accuracy_ensemble": evaluate(together, self.task.test_labels)[0],
        }

    def _collect(
        self, asked: Sequence[int], request: TrainRequest
    ) -> tuple[list[Update], dict[int, str], list[LedgerEntry]]:
        """Return the usable updates by rising client id, why the others are not there, and what all of them cost."""
        usable: dict[int, Update] = {}
        dropped: dict[int, str] = {}
        spent: list[LedgerEntry] = []
        for update in self._clients.train(asked, request) if asked else ():
            if update.client not in asked or update.client in usable:
                continue  # nobody asked this client, or it answers twice
            expected = request.weights[self.task.prototype_of[update.client]]
            problem = problem_of(update, expected=expected)
            if update.entry is not None:
                spent.append(update.entry)  # whatever is wrong with the update, it has left the client
            elif request.local.privacy is not None:
                problem = "states no privacy cost, which local.privacy asks for"
            if problem is None:
                usable[update.client] = update
                dropped.pop(update.client, None)  # an earlier answer was no good
            else:
                dropped[update.client] = problem
        reasons = self._clients.reasons()
        silent = [client for client in asked if client not in usable and client not in dropped]
        dropped |= {client: reasons.get(client, "no answer") for client in silent}
        return [usable[client] for client in sorted(usable)], dropped, sorted(spent, key=lambda entry: entry.client)


def clients_a_round(experiment: ExperimentFields) -> int:
    """Return how many clients a round asks, where so many are present: a share of the population, at least one."""
    return max(1, round(experiment.participation_rate * experiment.split.num_clients))


def select(present: Sequence[int], *, count: int, generator: np.random.Generator) -> list[int]:
    """Return a random subset of the clients that are present, rising."""
    order = generator.permutation(np.asarray(sorted(present), dtype=np.int64))
    return sorted(int(client) for client in order[:count])


def average_by_prototype(members: Sequence[Member]) -> dict[str, Weights]:
    """Average the members of each prototype that has any, weighted by their number of examples and their share."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        if member.weights and member.num_examples * member.share > 0:  # a share can be too old to be a number
            groups.setdefault(member.prototype, []).append(member)
    return {
        name: average(
            [member.weights for member in group], sizes=[member.num_examples * member.share for member in group]
        )
        for name, group in sorted(groups.items())
    }


def remembered(member: Member, predictions: Mapping[int, Tensor], method: Method, number: int) -> Stamped:
    """Return what the server keeps of a client that has answered, as far as the method remembers anything."""
    tensors: dict[str, Tensor] = {}
    if member.client in predictions:
        tensors["logits"] = predictions[member.client]
    if "weights" in method.memory:
        tensors |= {f"weights/{name}": tensor for name, tensor in member.weights.items()}
        tensors["num_examples"] = torch.tensor(member.num_examples)
    return Stamped(number, tensors)


def absent_members(task: Task, memory: Mapping[int, Stamped], *, number: int, answered: Sequence[int]) -> list[Member]:
    """Return the clients that are remembered from earlier rounds and have not answered in this one."""
    members = []
    for client, stamped in sorted(memory.items()):
        if client not in answered:
            own = {
                key.removeprefix("weights/"): tensor
                for key, tensor in stamped.tensors.items()
                if key.startswith("weights/")
            }
            share = task.experiment.memory.discount ** (number - stamped.round)
            examples = int(stamped.tensors["num_examples"]) if own else 0
            members.append(Member(client, task.prototype_of[client], examples, own, share=share))
    return members
