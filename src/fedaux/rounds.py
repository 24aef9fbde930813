"""The federation as the server sees it: prepare, then one round after another, written once over `Clients`.

State is a value: a round takes one and returns the next, so a checkpoint is a state and resuming is going on from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedaux import seeding
from fedaux.certainty import MECHANISMS, Public
from fedaux.clients import (
    Certificate,
    CertifyRequest,
    Clients,
    Stamped,
    TrainRequest,
    Update,
    Weights,
    num_bytes,
    problem_of,
)
from fedaux.compute import Compute
from fedaux.config import ExperimentFields
from fedaux.ensemble import Member
from fedaux.inference import Predictor
from fedaux.methods import Method
from fedaux.models import MODELS, SplitModel
from fedaux.privacy import LedgerEntry
from fedaux.server import average, evaluate, snapshot
from fedaux.student import Student
from fedaux.teaching import teach


@dataclass(frozen=True)
class Task:
    """One method and one seed of an experiment, with everything public that the server works on."""

    experiment: ExperimentFields
    method: Method
    seed: int
    image_shape: tuple[int, int, int]
    num_classes: int
    prototype_of: tuple[str, ...]
    """The prototype of each client."""
    negatives: Tensor
    distill_images: Tensor
    test_images: Tensor
    test_labels: Tensor
    validation: tuple[Tensor, Tensor] | None = None
    """Images and labels at the server, for methods that stop distillation early."""
    compute: Compute = field(default_factory=Compute)

    @property
    def device(self) -> torch.device:
        """Where the work is done."""
        return self.distill_images.device

    def architecture(self, prototype: str) -> str:
        """Return a name for what the models of a prototype have in common, whatever their weights."""
        (section,) = [one for one in self.experiment.prototypes if one.name == prototype]
        shape = "x".join(map(str, self.image_shape))
        return f"{section.model} {sorted(section.options.items())} {shape} {self.num_classes} {self.experiment.mode}"


@dataclass(frozen=True)
class State:
    """All that the server carries from round to round."""

    round: int
    weights: Mapping[str, Weights]
    """The server model of each prototype."""
    certificates: Mapping[int, Certificate] = field(default_factory=dict)
    """What clients have released; nobody is asked twice."""
    ledger: tuple[LedgerEntry, ...] = ()
    """What the updates of clients have cost them, where they are protected."""
    memory: Mapping[int, Stamped] = field(default_factory=dict)
    """What is kept of each client's last answer, for methods with a memory: its "logits" on the distill set, its
    "weights/NAME"."""


@dataclass(frozen=True)
class Preparation:
    """What the preparation phase leaves behind."""

    extractors: Mapping[str, Weights]
    """h0 of each prototype, where the method scores clients by it or trains heads on it."""
    public: Mapping[str, Public]
    seconds: Mapping[str, float]
    bytes_up: int
    bytes_down: int


class Watcher(Protocol):
    """Somebody who wants to know how far the work is."""

    def phase(self, task: Task, round: int, name: str) -> None:
        """Called when a phase begins."""
        ...

    def round(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics of a finished round."""
        ...


def assign_prototypes(experiment: ExperimentFields) -> tuple[str, ...]:
    """Return the prototype of each client: named ones first, the others by share, in turn."""
    names: dict[int, str] = {
        client: prototype.name for prototype in experiment.prototypes for client in prototype.clients or ()
    }
    sharing = [prototype for prototype in experiment.prototypes if prototype.clients is None]
    given = {prototype.name: 0 for prototype in sharing}
    for client in range(experiment.split.num_clients):
        if client not in names:
            # The one furthest behind its share is next, so every prefix of the clients is as mixed as the whole.
            behind = min(sharing, key=lambda prototype: (given[prototype.name] + 1) / prototype.share)
            given[behind.name] += 1
            names[client] = behind.name
    return tuple(names[client] for client in range(experiment.split.num_clients))


def build_models(task: Task) -> dict[str, SplitModel]:
    """Return each prototype's model with its initial random weights."""
    models = {}
    for prototype in task.experiment.prototypes:
        with seeding.initialisation(task.seed, part=prototype.name):
            model = MODELS[prototype.model](task.image_shape, task.num_classes, **prototype.options)
        models[prototype.name] = task.compute.place(model)
    return models


def trained_models(task: Task) -> dict[str, SplitModel]:
    """Return each prototype's model as far as it is trained: all of it, or in linear mode its head alone."""
    models = build_models(task)
    if task.experiment.mode == "full":
        return models
    width = {name: model.feature_width for name, model in models.items()}
    return {name: SplitModel(nn.Identity(), model.head, feature_width=width[name]) for name, model in models.items()}


def prepare(
    task: Task, clients: Clients, *, extractor: Callable[[str, SplitModel], Weights], watcher: Watcher
) -> tuple[State, Preparation]:
    """Carry out the preparation phase (Algorithm 1). `extractor(prototype, model)` returns its pretrained h0."""
    clock = Clock(task, 0, watcher)
    models, trained = build_models(task), trained_models(task)
    extractors: dict[str, Weights] = {}
    public: dict[str, Public] = {}
    certificates: dict[int, Certificate] = {}
    bytes_up = bytes_down = 0
    if task.method.start == "pretrained":
        with clock.phase("pretrain"):
            for name, model in models.items():
                model.features.load_state_dict(extractor(name, model))
                if task.experiment.mode == "full":
                    trained[name].features.load_state_dict(model.features.state_dict())
    linear = task.experiment.mode == "linear"
    if task.method.scores or linear:
        extractors = {name: snapshot(model.features) for name, model in models.items()}
    present = clients.present()
    if task.method.scores:
        with clock.phase("certify"):
            mechanism = MECHANISMS[task.experiment.certainty.mechanism](task.experiment.certainty)
            for name, model in models.items():
                predictor = Predictor(model.features, task.compute)
                batch_size = task.experiment.evaluation.batch_size
                public[name] = mechanism.publish(predictor(extractors[name], task.negatives, batch_size=batch_size))
            certificates, bytes_down, bytes_up = certify(task, clients, present, extractors=extractors, public=public)
    elif linear:  # whoever scores has been sent h0 for that already
        bytes_down = sum(num_bytes(extractors[task.prototype_of[client]]) for client in present)
    state = State(round=0, weights={name: snapshot(model) for name, model in trained.items()})
    preparation = Preparation(extractors, public, dict(clock.seconds), bytes_up, bytes_down)
    return replace(state, certificates=certificates), preparation


def certify(
    task: Task,
    clients: Clients,
    chosen: Sequence[int],
    *,
    extractors: Mapping[str, Weights],
    public: Mapping[str, Public],
) -> tuple[dict[int, Certificate], int, int]:
    """Ask clients for their releases; return those that came, by rising id, and the bytes down and up."""
    request = CertifyRequest(extractors, public, task.experiment.certainty, task.seed)
    answers = {answer.client: answer for answer in clients.certify(chosen, request) if answer.client in chosen}
    bytes_down = sum(request.num_bytes(task.prototype_of[client]) for client in chosen)
    return dict(sorted(answers.items())), bytes_down, sum(answer.num_bytes() for answer in answers.values())


class Scorer:
    """Certainty scores on the distill set, for the clients of a round only: memory grows with participants."""

    def __init__(self, task: Task, preparation: Preparation) -> None:
        self._task = task
        self._public = preparation.public
        models = build_models(task) if preparation.public else {}
        self._extractors = {name: Predictor(models[name].features, task.compute) for name in preparation.public}
        self._mechanism = MECHANISMS[task.experiment.certainty.mechanism](task.experiment.certainty)
        self._projected = {
            name: self.project(name, preparation.extractors[name], task.distill_images) for name in preparation.public
        }

    def project(self, prototype: str, extractor: Weights, images: Tensor) -> Tensor:
        """Return the projected features [N, k] of images under h0."""
        batch_size = self._task.experiment.evaluation.batch_size
        features = self._extractors[prototype](extractor, images, batch_size=batch_size)
        return self._mechanism.project(features, self._public[prototype])

    def log_scores(
        self,
        certificates: Mapping[int, Certificate],
        chosen: Sequence[int],
        projected: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N] of the chosen clients, on the distill set or on other projected features."""
        projected = self._projected if projected is None else projected
        rows: dict[int, Tensor] = {}
        for name, features in projected.items():
            members = [client for client in chosen if self._task.prototype_of[client] == name]
            if members:
                vectors = torch.stack([certificates[client].vector for client in members]).to(features)
                sigmas = torch.tensor([certificates[client].entry.sigma for client in members]).to(features)
                scores = self._mechanism.log_scores(vectors, sigmas, self._public[name], features)
                rows |= dict(zip(members, scores, strict=True))
        return torch.stack([rows[client] for client in chosen])


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
            extractor = Predictor(build_models(task)[prototype].features, task.compute)
            weights = self.preparation.extractors[prototype]
            return extractor(weights, images, batch_size=task.experiment.evaluation.batch_size)

        validation = None if task.validation is None else (inputs(task.validation[0]), task.validation[1])
        return Student(
            model,
            experiment=task.experiment,
            compute=task.compute,
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
        chosen = select(
            self._clients.present(),
            count=clients_a_round(experiment),
            generator=seeding.generator(task.seed, "selection", round=number),
        )
        certificates = dict(state.certificates)
        dropped: dict[int, str] = {}
        newcomers = [client for client in chosen if task.method.scores and client not in certificates]
        if newcomers:
            with clock.phase("certify"):
                late, bytes_down, bytes_up = certify(
                    task,
                    self._clients,
                    newcomers,
                    extractors=self.preparation.extractors,
                    public=self.preparation.public,
                )
            certificates |= late
            dropped = {client: "no certainty release" for client in newcomers if client not in late}
        asked = [client for client in chosen if client not in dropped]
        with clock.phase("train"):
            proximal = experiment.local.proximal if task.method.proximal else 0.0
            frozen = self.preparation.extractors if experiment.mode == "linear" else {}
            request = TrainRequest(number, state.weights, experiment.local, proximal, task.seed, frozen)
            updates, unusable, spent = self._collect(asked, request)
            dropped |= unusable
            bytes_down += sum(request.num_bytes(task.prototype_of[client]) for client in asked)
            bytes_up += sum(update.num_bytes() for update in updates)
        weights, memory = dict(state.weights), dict(state.memory)
        if updates:
            members = [Member(u.client, task.prototype_of[u.client], u.num_examples, u.weights) for u in updates]
            absent = absent_members(task, memory, number=number, answered=[u.client for u in updates])
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
                    )
                    predictions = lesson.predictions
                    dropped |= lesson.unusable
                if lesson.targets is not None:
                    with clock.phase("distill"):
                        weights = self._distill(weights, lesson.targets, number)
            memory |= {
                member.client: remembered(member, predictions, task.method, number)
                for member in members
                if task.method.memory and member.client not in dropped
            }
            if experiment.batch_normalisation.server == "auxiliary":
                with clock.phase("statistics"):
                    weights = {
                        name: student.with_public_statistics(weights[name]) for name, student in self.students.items()
                    }
        losses = [update.loss for update in updates if update.loss is not None]
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
            "clients_answered": [update.client for update in updates],
            "clients_dropped": {str(client): reason for client, reason in sorted(dropped.items())},
            "clients_remembered": sorted(set(memory) - {update.client for update in updates}) if updates else [],
            "model_kept": not updates,
            "bytes_up": bytes_up,
            "bytes_down": bytes_down,
        }
        if number % experiment.evaluation.every == 0 or number == experiment.rounds:
            with clock.phase("evaluate"):
                row |= self.evaluate(weights)
        row["seconds"] = dict(clock.seconds)
        self._watcher.round(row)
        return State(number, weights, certificates, (*state.ledger, *spent), memory), row

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
            "loss": float(np.mean([loss for _, loss in measured.values()])),
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
            else:
                dropped[update.client] = problem
        dropped |= {client: "no answer" for client in asked if client not in usable and client not in dropped}
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
        if member.weights:
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


class Clock:
    """Seconds by phase, announced to a watcher."""

    def __init__(self, task: Task, round: int, watcher: Watcher) -> None:
        self.seconds: dict[str, float] = {}
        self._task = task
        self._round = round
        self._watcher = watcher

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase; work on a GPU is waited for, so that it is booked where it belongs."""
        self._watcher.phase(self._task, self._round, name)
        began = time.perf_counter()
        yield
        if self._task.device.type == "cuda":
            torch.cuda.synchronize(self._task.device)
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - began, 6)
