"""The server: the verbs that methods call, and the frame of a run around them.

`Server.prepare` and `Server.play_round` are the frame: they call the method's `prepare` and
`round`, which call the verbs. Each verb times itself, counts bytes, checks the clients' answers,
and logs whom it drops and why. A method sees no device, no network and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty, ExperimentFields
from fedaux.core import ranks
from fedaux.core.asks import Asks
from fedaux.core.messages import (
    Clients,
    Measured,
    Member,
    TrainRequest,
    Update,
    Weights,
    num_bytes,
    problem_of,
)
from fedaux.core.metrics import information, measure_models
from fedaux.core.objectives import strength_of
from fedaux.core.releases import (
    ChoosePublic,
    Collected,
    Scorer,
    keep_new,
    publish,
    request_releases,
)
from fedaux.core.round_log import RoundLog
from fedaux.core.server_model import ServerModel, server_models
from fedaux.core.soft_labels import Mix, mixture, problem_of_labels
from fedaux.core.task import (
    Callback,
    Fields,
    Preparation,
    State,
    Task,
    build_models,
    extract,
    rehearsed_rows,
    standardised_by_public,
    trainable_models,
)
from fedaux.core.weights import AVERAGES, average_by_prototype, clipped, own_weights, snapshot
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Public

if TYPE_CHECKING:
    from fedaux.models import SplitModel

DIVERGED = "the round's model predicts NaN or infinity; a learning rate may be too high"
NONFINITE = "its model predicts NaN or infinity on public examples"
LARGEST_HALF = torch.finfo(torch.float16).max
"""Remembered predictions are kept in half precision."""
FIRST_RELEASES = 1000
"""At most this many clients, drawn at random, release before the first round, or as many as a round
asks if that is more. Where clients train, the others release when they are first selected."""
NO_CLIENT = -1
"""The client of a member that belongs to no client: a drawn model, or an average."""


@dataclass(frozen=True)
class Method:
    """A federated method: `prepare` is the paper's Algorithm 1, `round` one round of its
    Algorithm 2, both written with the verbs of `Server`.

    Subclasses are frozen dataclasses, so `dataclasses.replace` varies them.
    """

    name: str
    optimizer: tuple[Literal["adam", "sgd"], float] | None = field(default=None, kw_only=True)
    """The optimizer of local training and its learning rate; None takes them from `[local]`."""

    def own_settings(self, settings: Fields) -> Fields:
        """Return the settings with the method's own optimizer."""
        if self.optimizer is None:
            return settings
        changes = dict(zip(("optimizer", "learning_rate"), self.optimizer, strict=True))
        return settings.model_copy(update={"local": settings.local.model_copy(update=changes)})

    def asks(self, settings: ExperimentFields) -> Asks:
        """Return what the method asks of clients."""
        raise NotImplementedError

    def problems(self, settings: ExperimentFields) -> list[str]:
        """Return a line for each setting that the method cannot work with."""
        return []

    def prepare(self, server: Server) -> State:
        """Return the state before the first round."""
        return server.start()

    def round(self, server: Server, state: State) -> State:
        """Return the state after a round."""
        raise NotImplementedError

    def finish(self, server: Server, state: State) -> State:
        """Return the state after the last round."""
        return state

    def evaluated(self, server: Server, state: State) -> Iterable[Measured]:
        """Return the models that are measured; accuracy is their mean."""
        return [(name, own, None) for name, own in state.final.items()]


class NobodyAnswered(Exception):
    """No client is left in a round; it ends, and the state stays as it was."""


def prepare(
    task: Task,
    clients: Clients,
    *,
    extractor: Callable[[str, SplitModel], Weights],
    callback: Callback,
    choose_public: ChoosePublic = keep_new,
) -> tuple[State, Preparation]:
    """Run a method's preparation. `extractor(prototype, model)` returns the pretrained h0.
    `choose_public` may replace new public maps by the maps of an interrupted attempt."""
    server = Server(task, Preparation(), clients, callback=callback)
    state = server.prepare(extractor=extractor, choose_public=choose_public)
    return state, server.preparation


class Server:
    """The server of one task, with what a round needs besides its state."""

    def __init__(
        self, task: Task, preparation: Preparation, clients: Clients, *, callback: Callback
    ) -> None:
        assert isinstance(task.method, Method), "only a method can be run"
        self.task = task
        self.preparation = preparation
        self.log = RoundLog(task, 0, callback)
        """The log of the present round."""
        self._method = task.method
        self._clients = clients
        self._callback = callback
        self._choose_public: ChoosePublic = keep_new

    @cached_property
    def server_models(self) -> dict[str, ServerModel]:
        """The server's side of each prototype."""
        return server_models(self.task, self.preparation.extractors)

    @cached_property
    def scorer(self) -> Scorer:
        """Computes scores from the clients' releases."""
        return Scorer(self.task, self.preparation)

    # The frame: preparation, rounds, evaluation.

    def prepare(
        self, *, extractor: Callable[[str, SplitModel], Weights], choose_public: ChoosePublic
    ) -> State:
        """Run the method's preparation, which leaves h0 and public maps in `self.preparation`."""
        task, log = self.task, self.log
        self._extractor, self._choose_public = extractor, choose_public
        log.present = self._clients.present()
        state = self._method.prepare(self)
        sent = self._bytes_sent_once(log.present)
        if task.asks.is_bound:  # no federation, so nothing is sent
            down = up = 0
        else:
            down, up = log.bytes_down + sent, log.bytes_up
        self.preparation = replace(
            self.preparation, seconds=dict(log.seconds), bytes_up=up, bytes_down=down
        )
        return replace(state, ledger=(*state.ledger, *log.ledger))

    def play_round(self, state: State) -> tuple[State, dict[str, Any]]:
        """Run one round of the method; return the state after it and the round's metrics."""
        log = self.log = RoundLog(self.task, state.round + 1, self._callback)
        state = self._with_newcomers(state, self._select(state))
        try:
            after = self._accepted(state, self._method.round(self, state))
        except NobodyAnswered:
            after = state
        if log.round == self.task.experiment.rounds:
            after = self._method.finish(self, after)
        after = replace(after, round=log.round, ledger=(*state.ledger, *log.ledger))
        return after, log.row(after.memory, self._measured(after))

    def _select(self, state: State) -> list[int]:
        """Return S_t, a random sample of the clients that are present."""
        task, log = self.task, self.log
        if not task.asks.trains:
            log.present = list(state.releases)
            return []
        generator = seeding.generator(task.seed, "selection", round=log.round)
        log.present = self._clients.present()
        count = clients_per_round(task.experiment)
        log.asked = select(log.present, count=count, generator=generator)
        return log.asked

    def _with_newcomers(self, state: State, chosen: Sequence[int]) -> State:
        """Ask clients that have not released yet; drop clients that fail."""
        newcomers = [client for client in chosen if client not in state.releases]
        if not newcomers or not self.task.asks.releases:
            return state
        section = self.task.asks.releases[0]
        kept = self.preparation
        late = self._request(section, newcomers, kept.public, kept.extractors).releases
        reasons = self._clients.reasons()
        for client in newcomers:
            if client not in late:
                why = f": {reasons[client]}" if client in reasons else ""
                self.log.dropped[client] = f"no certainty release{why}"
        return replace(state, releases={**state.releases, **late})

    def _accepted(self, before: State, after: State) -> State:
        """Return the state after a round, or the one before it where a model diverged."""
        if after.models is before.models or all(self._are_finite([*after.models.items()])):
            return after
        self.log.dropped |= dict.fromkeys(self.log.answered, DIVERGED)
        return before

    def _measured(self, state: State) -> dict[str, Any]:
        """Measure the method's models in rounds that are due."""
        experiment, log = self.task.experiment, self.log
        if log.round % experiment.evaluation.every and log.round != experiment.rounds:
            return {}
        with log.phase("evaluate"):
            measured = self.evaluate(self._method.evaluated(self, state))
        if log.round != experiment.rounds:
            del measured["confusion"]  # large if there are many classes
        elif self.task.asks.distills:
            sides = self.server_models.items()
            tested = [side.test_logits(state.final[name]).softmax(dim=1) for name, side in sides]
            measured["information"] = {
                "public": float(information(self.beliefs(state.final))),
                "test": float(information(torch.stack(tested).mean(dim=0))),
            }
        return measured

    def evaluate(self, models: Iterable[Measured]) -> dict[str, Any]:
        """Measure models on the test data, personal ones in the proportions of their client."""
        sides = self.server_models
        logits = ((name, sides[name].test_logits(own), shares) for name, own, shares in models)
        return measure_models(logits, self.task.test_labels)

    def class_shares(self, client: int) -> Tensor:
        """Return a client's class shares [C], to measure a personal model; simulator only."""
        return self._clients.class_shares(client)

    # Verbs of the preparation.

    def start(self) -> State:
        """Return the state with initial models, on h0 where the method asks for it."""
        task, log = self.task, self.log
        models, trained = build_models(task), trainable_models(task)
        linear = task.experiment.mode == "linear"
        if task.asks.pretrained:
            with log.phase("pretrain"):
                for name, model in models.items():
                    model.features.load_state_dict(self._extractor(name, model))
                    if not linear:
                        trained[name].features.load_state_dict(model.features.state_dict())
        if task.asks.releases or linear:
            extractors: dict[str, Weights] = {
                name: snapshot(model.features) for name, model in models.items()
            }
            if linear:
                with log.phase("standardise"):
                    for name, own in extractors.items():
                        extractors[name] = standardised_by_public(task, name, own)
            self.preparation = replace(self.preparation, extractors=extractors)
        return State(round=0, models={name: snapshot(model) for name, model in trained.items()})

    def collect(
        self,
        section: Certainty,
        *,
        extractors: Mapping[str, Weights] | None = None,
        among: Sequence[int] | None = None,
    ) -> Collected:
        """Ask the clients that are present, or those in `among`, for a release under h0 or other
        extractors; where clients train, ask at most `FIRST_RELEASES`. Return the usable releases
        and their public maps.

        The public maps of a method's first release are kept, for clients that come later.
        """
        extractors = self.preparation.extractors if extractors is None else extractors
        asked, task = self.log.present if among is None else among, self.task
        with self.log.phase("release"):
            public = publish(task, self._clients, section, extractors, asked)
            public = self._choose_public(public, section)
        if task.asks.releases[:1] == (section,):
            self.preparation = replace(self.preparation, public=public)
        if task.asks.trains:
            count = max(FIRST_RELEASES, clients_per_round(task.experiment))
            asked = select(asked, count=count, generator=self.generator("first releases"))
        return self._request(section, asked, public, extractors)

    def _request(
        self,
        section: Certainty,
        chosen: Sequence[int],
        public: Mapping[str, Public],
        extractors: Mapping[str, Weights],
    ) -> Collected:
        """Ask clients for releases; log the price of the unusable ones."""
        with self.log.phase("release"):
            found, wasted, down, up = request_releases(
                self.task,
                self._clients,
                chosen,
                section=section,
                extractors=extractors,
                public=public,
            )
        self.log.count(down=down, up=up)
        self.log.ledger += wasted
        return Collected(found, public)

    def reasons(self) -> str:
        """Return why clients that were asked last did not answer, as the end of a sentence."""
        reasons = sorted(self._clients.reasons().items())
        return "".join(f"; client {client}: {text}" for client, text in reasons)

    def _bytes_sent_once(self, present: Sequence[int]) -> int:
        """Return the size of h0 and of public examples to rehearse, which clients get once."""
        task, total = self.task, 0
        if task.experiment.mode == "linear" and not task.asks.releases:
            extractors = self.preparation.extractors  # clients that release something have h0
            total = sum(num_bytes(extractors[task.prototype_of[client]]) for client in present)
        if task.asks.trains and not task.asks.is_bound and "rehearsal" in task.objectives:
            first = task.distill_set[:1]  # features are sent in half precision
            one = num_bytes({"one": first.half() if first.is_floating_point() else first})
            total += len(present) * one * len(rehearsed_rows(task))
        return total

    # Verbs of a round.

    def train(
        self,
        state: State,
        *,
        objectives: tuple[str, ...] | None = None,
        rehearse: Tensor | None = None,
        strengths: Mapping[str, float] | None = None,
        corrections: Mapping[int, Weights] | None = None,
        start: Callable[[int], Mapping[str, Weights]] | None = None,
    ) -> list[Member]:
        """Let the selected clients train; return the members with usable updates, by client id.

        They minimise the `objectives`, by default all that the method asks for, and the recipe's,
        with `strengths` where the recipe states none. They rehearse soft labels [N, C] of the
        distill set, by default the server models' own. `corrections` are added to the gradients of
        each client. Clients start from the server models, or from `start(client)`.
        """
        task, log = self.task, self.log
        asked = [client for client in log.asked if client not in log.dropped]
        local = task.experiment.local
        names = task.objectives if objectives is None else (*objectives, *local.objectives)
        objectives = tuple(dict.fromkeys(names))
        if strengths is not None:
            stated = {**strengths, **local.strengths}
            local = local.model_copy(update={"strengths": stated})
        soft_labels = None
        if "rehearsal" in objectives:
            if rehearse is None:
                rehearse = self.beliefs(state.models)
            strength = strength_of("rehearsal", local)
            soft_labels = (strength * rehearse[rehearsed_rows(task)]).half()
        linear = task.experiment.mode == "linear"
        with log.phase("train"):
            request = TrainRequest(
                log.round,
                state.models,
                local,
                local.proximal if "proximal" in objectives else 0.0,
                task.seed,
                extractors=self.preparation.extractors if linear else {},
                wire=task.experiment.federation.wire,
                objectives=objectives,
                rehearsed=0 if soft_labels is None else task.experiment.rehearsal.batch_size,
                soft_labels=soft_labels,
                mirror=task.mirrors,
                corrections={} if corrections is None else corrections,
            )
            if start is None:
                updates = self._collect(asked, request)
            else:
                requests = [(one, replace(request, weights=start(one))) for one in asked]
                updates = [own for one, each in requests for own in self._collect([one], each)]
            if not task.asks.is_bound:
                prototypes = [(task.prototype_of[client], client) for client in asked]
                log.count(
                    down=sum(request.num_bytes(*one) for one in prototypes),
                    up=sum(update.num_bytes(wire=request.wire) for update in updates),
                )
            log.losses |= {one.client: one.loss for one in updates if one.loss is not None}
            members = [
                Member(one.client, task.prototype_of[one.client], one.num_examples, one.weights)
                for one in updates
            ]
            finite = self._are_finite([(member.prototype, member.weights) for member in members])
        members = self._without(members, finite)
        log.answered = [member.client for member in members]
        if not members:
            raise NobodyAnswered
        if task.experiment.aggregation == "clipped":  # averaging and teaching see clipped models
            members = clipped(members, state.models)
        return members

    def _collect(self, asked: Sequence[int], request: TrainRequest) -> list[Update]:
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
        self.log.dropped |= dropped
        self.log.dropped |= {client: reasons.get(client, "no answer") for client in silent}
        self.log.ledger += sorted(spent, key=lambda entry: entry.client)
        return [usable[client] for client in sorted(usable)]

    def _are_finite(self, models: Sequence[tuple[str, Weights]]) -> list[bool]:
        """Return which models, as pairs of prototype and weights, have finite predictions."""
        flags = [self.server_models[name].is_finite(weights) for name, weights in models]
        return torch.stack(flags).tolist() if flags else []  # the only wait for the device

    def _without(self, members: Sequence[Member], finite: Sequence[bool]) -> list[Member]:
        """Return the finite members; drop the clients of the others."""
        pairs = list(zip(members, finite, strict=True))
        dropped = [one.client for one, fine in pairs if not fine and one.client != NO_CLIENT]
        self.log.dropped |= dict.fromkeys(dropped, NONFINITE)
        return [member for member, fine in pairs if fine]

    def absent(self, state: State, members: Sequence[Member]) -> list[Member]:
        """Return the remembered answers of clients that are not among these members."""
        task, answered = self.task, {member.client for member in members}
        found = []
        for client, kept in sorted(state.memory.items()):
            if client not in answered:
                weights, logits = own_weights(kept), kept.tensors.get("logits")
                share = task.experiment.memory.discount ** (self.log.round - kept.round)
                examples = int(kept.tensors["num_examples"]) if weights else 0
                logits = None if logits is None else logits.float()
                member = Member(client, task.prototype_of[client], examples, weights, share, logits)
                found.append(member)
        return found

    def predict(self, members: Sequence[Member]) -> list[Member]:
        """Return the members with their logits on the distill set, by client id; drop
        members with non-finite ones."""
        members = sorted(members, key=lambda member: member.client)
        new = [member for member in members if member.logits is None]
        with self.log.phase("teach"):
            logits: dict[int, Tensor] = {}  # by identity: drawn models share a client number
            for name, model in self.server_models.items():
                group = [member for member in new if member.prototype == name]
                outputs = ranks.spread(model.all_logits, [member.weights for member in group])
                logits |= {id(one): output for one, output in zip(group, outputs, strict=True)}
            flags = [torch.isfinite(logits[id(member)]).all() for member in new]
            finite = torch.stack(flags).tolist() if flags else []
            fine = {id(member) for member in self._without(new, finite)}
        members = [
            member if member.logits is not None else replace(member, logits=logits[id(member)])
            for member in members
            if member.logits is not None or id(member) in fine
        ]
        here = {client for client in self.log.answered if client not in self.log.dropped}
        if not members or (
            self.log.answered and not any(one.client in here | {NO_CLIENT} for one in members)
        ):
            raise NobodyAnswered
        return members

    def average(self, state: State, members: Sequence[Member]) -> dict[str, Weights]:
        """Return the models with each prototype's members averaged, by `aggregation`."""
        with self.log.phase("average"):
            average = AVERAGES[self.task.experiment.aggregation]
            return {**state.models, **average_by_prototype(members, average=average)}

    def beliefs(self, models: Mapping[str, Weights]) -> Tensor:
        """Return q(c | x) on the distill set [N, C]: the mean of the models' probabilities."""
        with self.log.phase("beliefs"):
            sides = self.server_models.items()
            every = [side.logits(models[name]).softmax(dim=1) for name, side in sides]
            return torch.stack(every).mean(dim=0)

    def log_scores(self, state: State, members: Sequence[Member]) -> Tensor:
        """Return the log certainty scores log s_i(x) of members on the distill set [K, N]."""
        with self.log.phase("teach"):
            clients = [member.client for member in members]
            return self.scorer.log_scores(state.releases, clients)

    def mix(
        self, members: Sequence[Member], weights: Tensor, *, of: Mix = "probabilities"
    ) -> Tensor:
        """Return soft labels [N, C]: the members' predictions, weighted by [K, N] or [K, 1]; record
        how the weight is spread over clients."""
        with self.log.phase("teach"):
            self.log.weights = {
                member.client: weight
                for member, weight in zip(members, weights.mean(dim=1).tolist(), strict=True)
                if member.client != NO_CLIENT
            }
            return mixture(members, weights, of=of)

    def distill(self, models: Mapping[str, Weights], labels: Tensor) -> dict[str, Weights]:
        """Return the models after distillation on soft labels [N, C] of the distill set.

        Raises ValueError if the labels are not distributions.
        """
        task, log = self.task, self.log
        with log.phase("teach"):
            shape = (len(task.distill_set), task.num_classes)
            if (problem := problem_of_labels(labels, shape=shape)) is not None:
                raise ValueError(f"method {task.method.name}: its soft labels {problem}")
            log.weight_by_class = labels.mean(dim=0).tolist()

        def distilled(names: Sequence[str]) -> list[Weights]:
            return [
                self.server_models[name].distill(
                    models[name], labels, self.generator("distillation", part=name)
                )
                for name in names
            ]

        with log.phase("distill"):
            return dict(zip(models, ranks.spread(distilled, list(models)), strict=True))

    def generator(self, purpose: str, *, part: str = "") -> np.random.Generator:
        """Return a random stream for a purpose of the method in this round."""
        return seeding.generator(self.task.seed, purpose, round=self.log.round, part=part)

    def features(
        self, prototype: str, images: Tensor, *, extractors: Mapping[str, Weights] | None = None
    ) -> Tensor:
        """Return the features [n, F] of public examples under h0 or other extractors."""
        extractors = self.preparation.extractors if extractors is None else extractors
        return extract(self.task, prototype, extractors[prototype], images)


def kept_logits(members: Iterable[Member], answered: Iterable[int]) -> dict[int, dict[str, Tensor]]:
    """Return the predictions to remember of clients that have answered."""
    here = set(answered)
    return {
        one.client: {"logits": one.logits.clamp(-LARGEST_HALF, LARGEST_HALF).half()}
        for one in members
        if one.logits is not None and one.client in here
    }


def kept_weights(members: Iterable[Member]) -> dict[int, dict[str, Tensor]]:
    """Return the models to remember of members."""
    return {
        one.client: {f"weights/{name}": tensor for name, tensor in one.weights.items()}
        | {"num_examples": torch.tensor(one.num_examples)}
        for one in members
    }


def clients_per_round(experiment: ExperimentFields) -> int:
    """Return how many clients a round asks: a share of the population, at least one."""
    return max(1, round(experiment.participation_rate * experiment.split.num_clients))


def select(present: Sequence[int], *, count: int, generator: np.random.Generator) -> list[int]:
    """Return a random subset of the clients that are present, in ascending order."""
    return sorted(present[place] for place in generator.permutation(len(present))[:count])
