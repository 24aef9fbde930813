"""The training phase (Algorithm 2) as the server runs it, for any `Clients`.

State is a value: a round takes one and returns the next. A checkpoint is a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.messages import (
    Clients,
    ClientState,
    ScoreRelease,
    TrainRequest,
    Update,
    Weights,
    problem_of,
)
from fedaux.core.methods import Method
from fedaux.core.objectives import steered, strength_of
from fedaux.core.preparation import Scorer, release_scores
from fedaux.core.round_log import RoundLog
from fedaux.core.server_model import server_models
from fedaux.core.task import (
    Callback,
    Preparation,
    State,
    Task,
    objectives_of,
    rehearsed_rows,
)
from fedaux.core.teachers import NONFINITE, Lesson, Member, teach
from fedaux.core.weights import (
    AVERAGES,
    average_by_prototype,
    class_shares,
    clipped,
    evened,
    falling,
    head_by_class,
    measure_models,
    own_weights,
    server_step,
    smoothed,
)
from fedaux.privacy.ledger import LedgerEntry

if TYPE_CHECKING:
    from fedaux.core.corrections import Controls

DIVERGED = "the round's model predicts NaN or infinity; a learning rate may be too high"
NO_LESSON = Lesson(targets=None, predictions={}, unusable={})


@dataclass(frozen=True)
class Beliefs:
    """What the server believes about the distill set before a round."""

    probabilities: Tensor
    """q(c | x) [N, C]: the server models' mean, with a share of the private head's."""
    reliability: float
    """Of the clients' class sums, in 0 .. 1; 1 for methods without."""


@dataclass(frozen=True)
class Round:
    """What the server knows of a round before clients train, and the log of the round."""

    state: State
    """After the last round, with the releases of clients that are new in this one."""
    beliefs: Beliefs | None
    """None for methods that need none."""
    controls: Mapping[str, Controls]
    """The control variates of each prototype's clients; empty for methods without."""
    log: RoundLog


class Server:
    """The server of one task: what a round needs besides its state."""

    def __init__(
        self, task: Task, preparation: Preparation, clients: Clients, *, callback: Callback
    ) -> None:
        self.task = task
        self.preparation = preparation
        self.scorer = Scorer(task, preparation)
        self.server_models = server_models(task, preparation.extractors)
        self._clients = clients
        self._callback = callback

    def play_round(self, state: State) -> tuple[State, dict[str, Any]]:
        """Play one round (Algorithm 2): select, train, average, teach, distill, evaluate."""
        log = RoundLog(self.task, state.round + 1, self._callback)
        chosen = self._select(state, log)
        state = self._with_releases(state, chosen, log)
        current = Round(state, self._beliefs(state, log), self._controls(state, log), log)
        members = self._train(current, chosen)
        weights, lesson = state.weights, NO_LESSON
        if self._learns_from(members):
            absent = absent_members(self.task, state.memory, members, number=log.round)
            weights = self._average(current, members, absent)
            lesson = self._teach(current, members, absent)
            if lesson.unusable:  # clients that do not teach are not averaged in, either
                members = log.without_dropped(members)
                weights = self._average(current, members, absent)
            weights = self._distill(weights, lesson.targets, log)
            weights = self._with_public_statistics(weights, log)
            weights, members = self._accept(current, weights, members)
        after = self._next_state(current, weights, members, lesson)
        return after, log.row(members, after.memory, self._evaluate(after, log))

    def _select(self, state: State, log: RoundLog) -> list[int]:
        """Return S_t, the clients to ask: a random share of the population, as far as present."""
        task = self.task
        if not task.method.trains:
            log.present = list(state.releases)
            return log.asked
        generator = seeding.generator(task.seed, "selection", round=log.round)
        log.present = self._clients.present()
        log.asked = select(
            log.present, count=clients_per_round(task.experiment), generator=generator
        )
        return log.asked

    def _with_releases(self, state: State, chosen: Sequence[int], log: RoundLog) -> State:
        """Ask clients that have not released scores yet; those that fail again are dropped."""
        newcomers = [client for client in chosen if client not in state.releases]
        if not newcomers or not self.task.method.scores_first:
            return state
        extractors, public = self.preparation.extractors, self.preparation.public
        with log.phase("certify"):
            late, wasted, down, up = release_scores(
                self.task, self._clients, newcomers, extractors=extractors, public=public
            )
        log.count(down=down, up=up)
        log.ledger += wasted
        reasons = self._clients.reasons()
        for client in newcomers:
            if client not in late:
                why = f": {reasons[client]}" if client in reasons else ""
                log.dropped[client] = f"no certainty release{why}"
        return replace(state, releases={**state.releases, **late})

    def _beliefs(self, state: State, log: RoundLog) -> Beliefs | None:
        """Return what the server believes about the distill set, if the method asks for it."""
        method = self.task.method
        needed = method.teacher in ("belief", "private-head")
        if not needed and "rehearsal" not in objectives_of(self.task):
            return None
        with log.phase("beliefs"):
            models = self.server_models.items()
            logits = [model.logits(state.weights[name]) for name, model in models]
            probabilities = torch.stack([own.softmax(dim=1) for own in logits]).mean(dim=0)
            if method.mechanism != "classes":
                return Beliefs(probabilities, reliability=1.0)
            private, reliability = self.scorer.private_beliefs(state.releases)
            fixed = method.teacher == "private-head"
            share = 1.0 if fixed else method.anchor * reliability / log.round
            return Beliefs(torch.lerp(probabilities, private, share), reliability)

    def _controls(self, state: State, log: RoundLog) -> dict[str, Controls]:
        """Return the control variates of each prototype's clients, if the method corrects
        gradients."""
        kind, task = self.task.method.correction, self.task
        if kind is None:
            return {}
        from fedaux.core.corrections import controls_of  # late: few methods need it

        return controls_of(
            kind,
            local=task.experiment.local,
            weights=state.weights,
            memory=state.memory,
            population=log.present,
            prototype_of=task.prototype_of,
        )

    def _train(self, current: Round, chosen: Sequence[int]) -> list[Member]:
        """Return the clients whose updates are valid and finite, in ascending order."""
        task, log = self.task, current.log
        asked = [client for client in chosen if client not in log.dropped]
        with log.phase("train"):
            request = self._request(current, asked)
            if task.method.exchange == "nothing":
                updates = self._train_alone(asked, request, current)
            else:
                updates = self._collect(asked, request, log)
            if task.method.exchange == "models":
                log.count(
                    down=sum(
                        request.num_bytes(task.prototype_of[client], client) for client in asked
                    ),
                    up=sum(update.num_bytes(wire=request.wire) for update in updates),
                )
            log.losses |= {one.client: one.loss for one in updates if one.loss is not None}
            members = [
                Member(one.client, task.prototype_of[one.client], one.num_examples, one.weights)
                for one in updates
            ]
            finite = self._are_finite([(member.prototype, member.weights) for member in members])
            log.dropped |= {
                member.client: NONFINITE
                for member, fine in zip(members, finite, strict=True)
                if not fine
            }
        members = log.without_dropped(members)
        if task.experiment.aggregation == "clipped":  # averaging and teaching see clipped models
            members = clipped(members, current.state.weights)
        return members

    def _request(self, current: Round, asked: Sequence[int]) -> TrainRequest:
        """Return what clients are asked in a round.

        They rehearse soft labels in half precision, scaled by the reliability of the releases.
        """
        task, experiment, objectives = self.task, self.task.experiment, objectives_of(self.task)
        local, beliefs, soft_labels = experiment.local, current.beliefs, None
        if beliefs is not None:
            normalised = any(model.normalised for model in self.server_models.values())
            local = steered(
                local, task.method, normalised=normalised, reliability=beliefs.reliability
            )
        if beliefs is not None and "rehearsal" in objectives:
            strength = strength_of("rehearsal", local) * beliefs.reliability
            soft_labels = (strength * beliefs.probabilities[rehearsed_rows(task)]).half()
        corrections = {
            client: current.controls[task.prototype_of[client]].correction(client)
            for client in asked
            if current.controls
        }
        return TrainRequest(
            current.log.round,
            current.state.weights,
            local,
            local.proximal if "proximal" in objectives else 0.0,
            task.seed,
            extractors=self.preparation.extractors if experiment.mode == "linear" else {},
            wire=experiment.federation.wire,
            objectives=objectives,
            rehearsed=0 if soft_labels is None else experiment.rehearsal.batch_size,
            beliefs=soft_labels,
            mirror=task.mirrors,
            corrections=corrections,
        )

    def _train_alone(
        self, asked: Sequence[int], request: TrainRequest, current: Round
    ) -> list[Update]:
        """Return usable updates of clients that each go on from their own model, if they have
        one."""
        updates, memory = list[Update](), current.state.memory
        for client in asked:
            own = own_weights(memory[client]) if client in memory else None
            start = request.weights if own is None else {self.task.prototype_of[client]: own}
            updates += self._collect([client], replace(request, weights=start), current.log)
        return updates

    def _collect(self, asked: Sequence[int], request: TrainRequest, log: RoundLog) -> list[Update]:
        """Return usable updates by client id; log why others are unusable, and all costs."""
        usable: dict[int, Update] = {}
        dropped: dict[int, str] = {}
        spent: list[LedgerEntry] = []
        for update in self._clients.train(asked, request) if asked else ():
            if update.client not in asked or update.client in usable:
                continue  # a client that was not asked, or that answers twice
            expected = request.weights[self.task.prototype_of[update.client]]
            problem = problem_of(update, expected=expected)
            if update.entry is not None:
                spent.append(update.entry)  # even an unusable update has left the client
            elif request.local.privacy is not None:
                problem = "states no privacy cost, which local.privacy asks for"
            if problem is None:
                usable[update.client] = update
                dropped.pop(update.client, None)  # an earlier answer was unusable
            else:
                dropped[update.client] = problem
        reasons = self._clients.reasons()
        silent = [client for client in asked if client not in usable and client not in dropped]
        log.dropped |= dropped | {client: reasons.get(client, "no answer") for client in silent}
        log.ledger += sorted(spent, key=lambda entry: entry.client)
        return [usable[client] for client in sorted(usable)]

    def _are_finite(self, models: Sequence[tuple[str, Weights]]) -> list[bool]:
        """Return which models, as pairs of prototype and weights, have finite predictions."""
        flags = [self.server_models[name].is_finite(weights) for name, weights in models]
        return torch.stack(flags).tolist() if flags else []  # the only wait for the device

    def _learns_from(self, members: Sequence[Member]) -> bool:
        """Return whether the server models change: if clients answer, or if none has to."""
        method = self.task.method
        if not method.trains:
            return method.teacher is not None
        return bool(members) and method.exchange != "nothing"

    def _average(
        self, current: Round, members: Sequence[Member], absent: Sequence[Member]
    ) -> Mapping[str, Weights]:
        """Average each prototype's models; the server moves by `server_rate` times the change.

        Heads on frozen features are soon where they should be; then those of clients with few
        classes overfit, and a rate above 1 falls.
        """
        before, controls = current.state.weights, current.controls
        if not members:
            return before
        with current.log.phase("average"):
            experiment, method = self.task.experiment, self.task.method
            aggregation, rate = experiment.aggregation, method.server_rate
            if experiment.mode == "linear" and rate > 1 and method.mechanism == "classes":
                rate = falling(
                    rate,
                    round=current.log.round,
                    rounds=experiment.rounds,
                    concentration=self.scorer.concentration(current.state.releases),
                )
            equal = [replace(one, num_examples=1) for one in members] if controls else members
            after = average_by_prototype([*equal, *absent], average=AVERAGES[aggregation])
            if method.head_by_class and aggregation == "mean":
                after = self._with_heads_by_class(after, [*members, *absent], current)
            after = {
                **before,
                **{name: server_step(before[name], own, rate=rate) for name, own in after.items()},
            }
            for name in {member.prototype for member in members if controls}:
                after[name] = controls[name].shifted(after[name], members)
            return after

    def _with_heads_by_class(
        self, models: Mapping[str, Weights], members: Sequence[Member], current: Round
    ) -> dict[str, Weights]:
        """Return the averages of prototypes with their heads averaged by class."""
        found, state = {}, current.state
        for name, model in models.items():
            own = [member for member in members if member.prototype == name and member.weights]
            counts = self.scorer.class_counts(state.releases, [one.client for one in own])
            heads, shares = [one.weights for one in own], class_shares(counts, own)
            head = head_by_class(heads, shares, before=state.weights[name])
            if self.task.experiment.mode == "linear":
                head = evened(head, before=state.weights[name], round=current.log.round)
            found[name] = {**model, **head}
        return found

    def _teach(self, current: Round, members: Sequence[Member], absent: Sequence[Member]) -> Lesson:
        """Return the soft labels of the clients, or of the heads that they have released; those
        with non-finite predictions are dropped."""
        task, state, log = self.task, current.state, current.log
        if task.method.teacher is None:
            return NO_LESSON
        if task.method.heads:
            from fedaux.core.heads import head_members  # late: few methods need it

            members, absent = head_members(task, self.preparation, state), ()
        with log.phase("teach"):
            log.lesson = teach(
                members,
                absent if "predictions" in task.method.memory else [],
                method=task.method,
                experiment=task.experiment,
                server_models=self.server_models,
                memory=state.memory,
                log_scores=lambda ids: self.scorer.log_scores(state.releases, ids),
                generator=lambda: seeding.generator(task.seed, "bayesian", round=log.round),
                num_classes=task.num_classes,
                beliefs=None if current.beliefs is None else current.beliefs.probabilities,
                class_counts=lambda ids: self.scorer.class_counts(state.releases, ids),
                class_prior=lambda: self.scorer.class_prior(state.releases),
            )
        log.dropped |= log.lesson.unusable
        return log.lesson

    def _distill(
        self, weights: Mapping[str, Weights], targets: Tensor | None, log: RoundLog
    ) -> Mapping[str, Weights]:
        """Distill every prototype's averaged model on the same soft labels, if there are any."""
        if targets is None:
            return weights
        distilled = {}
        with log.phase("distill"):
            for name, server_model in self.server_models.items():
                generator = seeding.generator(
                    self.task.seed, "distillation", round=log.round, part=name
                )
                distilled[name] = server_model.distill(weights[name], targets, generator=generator)
        return distilled

    def _with_public_statistics(
        self, weights: Mapping[str, Weights], log: RoundLog
    ) -> Mapping[str, Weights]:
        """Recompute statistics of batch normalisation on public examples, if asked for."""
        if self.task.experiment.batch_normalisation.server != "auxiliary":
            return weights
        with log.phase("statistics"):
            return {
                name: server_model.with_public_statistics(weights[name])
                for name, server_model in self.server_models.items()
            }

    def _accept(
        self, current: Round, weights: Mapping[str, Weights], members: list[Member]
    ) -> tuple[Mapping[str, Weights], list[Member]]:
        """Return the round's models and members; a round that diverged keeps the old models."""
        if all(self._are_finite([*weights.items()])):
            return weights, members
        current.log.dropped |= dict.fromkeys((member.client for member in members), DIVERGED)
        return current.state.weights, []

    def _next_state(
        self,
        current: Round,
        weights: Mapping[str, Weights],
        members: Sequence[Member],
        lesson: Lesson,
    ) -> State:
        """Return the state after the round: remember clients, smooth and calibrate the models."""
        method, state, log = self.task.method, current.state, current.log
        kept = {
            one.client: remembered(one, lesson.predictions, method, log.round, current.controls)
            for one in members
            if method.remembers
        }
        smooth, releases = self._smoothed(state, weights, log.round), state.releases
        if method.calibrated and log.round == self.task.experiment.rounds:
            smooth, releases = self._calibrated(smooth or weights, releases, log)
        ledger = (*state.ledger, *log.ledger)
        return State(log.round, weights, releases, ledger, {**state.memory, **kept}, smooth)

    def _smoothed(
        self, state: State, weights: Mapping[str, Weights], number: int
    ) -> Mapping[str, Weights]:
        """Return the average of the server models over rounds, if the method asks for it."""
        decay, before = self.task.method.smoothing, state.smoothed
        if decay == 0:
            return {}
        return {
            name: smoothed(before.get(name), state.weights[name], own, decay=decay, round=number)
            for name, own in weights.items()
        }

    def _calibrated(
        self, weights: Mapping[str, Weights], known: Mapping[int, ScoreRelease], log: RoundLog
    ) -> tuple[Mapping[str, Weights], Mapping[int, ScoreRelease]]:
        """Return the models with heads from a release of class sums of the trained features."""
        from fedaux.core.calibration import calibrate  # late: few methods need it

        if known:
            raise ValueError(
                f"method {self.task.method.name}: clients have released class sums after the last "
                "round, and more rounds would need a second release; start a new run"
            )
        with log.phase("calibrate"):
            found = calibrate(self.task, self.preparation, self._clients, log.present, weights)
        log.count(down=found.bytes_down, up=found.bytes_up)
        log.ledger += found.wasted
        return found.weights, found.releases

    def _evaluate(self, state: State, log: RoundLog) -> dict[str, Any]:
        """Measure the server models, or those of clients that train alone, in rounds that are
        due."""
        experiment = self.task.experiment
        if log.round % experiment.evaluation.every and log.round != experiment.rounds:
            return {}
        models = [*state.final.items()]
        if self.task.method.exchange == "nothing" and state.memory:
            models = [
                (self.task.prototype_of[client], own_weights(own))
                for client, own in sorted(state.memory.items())
            ]
        with log.phase("evaluate"):
            measured = self.evaluate(models)
            if log.round != experiment.rounds:
                del measured["confusion"]  # large if there are many classes
            return measured

    def evaluate(self, models: Iterable[tuple[str, Weights]]) -> dict[str, Any]:
        """Measure models, as pairs of prototype and weights, on the test data."""
        logits = ((name, self.server_models[name].test_logits(own)) for name, own in models)
        return measure_models(logits, self.task.test_labels)


def clients_per_round(experiment: ExperimentFields) -> int:
    """Return how many clients a round asks: a share of the population, at least one."""
    return max(1, round(experiment.participation_rate * experiment.split.num_clients))


def select(present: Sequence[int], *, count: int, generator: np.random.Generator) -> list[int]:
    """Return a random subset of the clients that are present, in ascending order."""
    order = generator.permutation(np.asarray(sorted(present), dtype=np.int64))
    return sorted(int(client) for client in order[:count])


def remembered(
    member: Member,
    predictions: Mapping[int, Tensor],
    method: Method,
    number: int,
    controls: Mapping[str, Controls],
) -> ClientState:
    """Return what the method remembers of a client that has answered."""
    tensors: dict[str, Tensor] = {}
    if member.client in predictions:
        tensors["logits"] = predictions[member.client]
    if "weights" in method.memory:
        tensors |= {f"weights/{name}": tensor for name, tensor in member.weights.items()}
        tensors["num_examples"] = torch.tensor(member.num_examples)
    if member.prototype in controls:
        control = controls[member.prototype].renewed(member)
        tensors |= {f"control/{name}": tensor for name, tensor in control.items()}
    return ClientState(number, tensors)


def absent_members(
    task: Task, memory: Mapping[int, ClientState], answered: Sequence[Member], *, number: int
) -> list[Member]:
    """Return the clients that are remembered from earlier rounds and did not answer in this one."""
    present = {member.client for member in answered}
    members = []
    for client, stamped in sorted(memory.items()):
        if client not in present:
            own = own_weights(stamped)
            share = task.experiment.memory.discount ** (number - stamped.round)
            examples = int(stamped.tensors["num_examples"]) if own else 0
            members.append(Member(client, task.prototype_of[client], examples, own, share=share))
    return members
