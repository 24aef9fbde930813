"""What each client will spend, before anything runs: `fedaux privacy RECIPE`.

The sizes n_i are public under the neighbouring relation, and with them everything here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import RenderableType
from rich.table import Table

from fedaux import seeding
from fedaux.config import Certainty, ExperimentFields
from fedaux.core.dpsgd import schedule
from fedaux.core.methods import METHODS
from fedaux.core.round import clients_per_round
from fedaux.core.task import assign_prototypes
from fedaux.formatting import interval, privacy_budget
from fedaux.models import MODELS
from fedaux.privacy import mean, paper
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import NEIGHBOURS, UNPROTECTED, UNPROTECTED_BESIDES_UPDATES

NOISE_LIMIT = 0.5
"""Noise of a norm above this share of the largest possible signal calls for a warning."""
COMPONENTS_OFF = 2.0
"""As many times more or fewer components than suit the noise are worth a line."""

Cost = tuple[float, float]
"""(epsilon, delta)."""


@dataclass(frozen=True)
class ScorePlan:
    """What certainty scores cost a client, and whether the noise leaves any signal."""

    cost: Cost
    noise_share: float
    """Norm of the noise, sigma sqrt(k), over the largest possible norm of what it hides."""
    enough_examples: int | None
    """The least n_i at which that is at most NOISE_LIMIT; None where no size will do."""


@dataclass(frozen=True)
class ClientPlan:
    """What one client will spend."""

    client: int
    num_examples: int
    scores: ScorePlan | None
    update: Cost | None
    """One round of local training; None where it is not protected."""
    expected: Cost | None
    """Everything, at the expected number of rounds; None where updates are not protected."""
    worst: Cost | None
    """Everything, if the client is asked in every round; None where updates are not protected."""


@dataclass(frozen=True)
class MethodsPlan:
    """The clients of methods that ask the same of them."""

    methods: tuple[str, ...]
    scores: bool
    clients: tuple[ClientPlan, ...]


@dataclass(frozen=True)
class PrivacyPlan:
    """What a recipe will cost its clients."""

    certainty: Certainty
    protected_updates: bool
    rounds: int
    expected_rounds: int
    empty_clients: tuple[int, ...]
    groups: tuple[MethodsPlan, ...]
    feature_width: int
    """The largest of any prototype."""

    def warnings(self) -> list[str]:
        """Name the clients whose noise drowns their signal, and the size that would do."""
        clients = [
            client for group in self.groups for client in group.clients if client.scores is not None
        ]
        drowned = [
            c for c in clients if c.scores is not None and c.scores.noise_share > NOISE_LIMIT
        ]
        by_need: dict[int | None, list[ClientPlan]] = {}
        for client in drowned:
            assert client.scores is not None
            by_need.setdefault(client.scores.enough_examples, []).append(client)
        return [self._warning(needed, members) for needed, members in by_need.items()]

    def _warning(self, needed: int | None, members: Sequence[ClientPlan]) -> str:
        section = self.certainty
        sizes = [member.num_examples for member in members]
        shares = [member.scores.noise_share for member in members if member.scores is not None]
        knobs = {"mean": "raise certainty.epsilon or lower certainty.components"}
        advice = knobs.get(section.mechanism, "raise certainty.epsilon or certainty.regularisation")
        remedy = (
            f"it takes {needed} examples" if needed is not None else "no number of examples will do"
        )
        return (
            f"Warning: {_listed([member.client for member in members])} with {interval(sizes)} examples: the noise on "
            f"the certainty scores is {interval(shares)} times the largest signal there can be. For {NOISE_LIMIT:g} at "
            f"epsilon {section.epsilon:g} {remedy}; {advice}."
        )

    def sentences(self) -> list[str]:
        """Say in words what the tables rest on."""
        lines = [f"Neighbours are {NEIGHBOURS}."]
        scored = [
            client.scores
            for group in self.groups
            for client in group.clients
            if client.scores is not None
        ]
        if any(math.isinf(scores.cost[0]) for scores in scored):
            lines.insert(
                0,
                f"NOT PRIVATE: certainty scores through `{self.certainty.mechanism}` have no finite ε.",
            )
        if self.empty_clients:
            lines.append(
                f"Without examples, and so without a part in this: {_listed(self.empty_clients)}."
            )
        if self.protected_updates:
            lines.append(
                f"A client is expected in {self.expected_rounds} of {self.rounds} rounds, and in all of them at worst; "
                "scores and updates are composed by privacy loss distributions."
            )
        lines.append(
            f"Not protected: {UNPROTECTED_BESIDES_UPDATES if self.protected_updates else UNPROTECTED}"
        )
        return [*lines, *self.warnings(), *self._hints()]

    def _hints(self) -> list[str]:
        """Say how many components would suit the noise, where there are many more or fewer."""
        sizes = [
            client.num_examples for group in self.groups if group.scores for client in group.clients
        ]
        section = self.certainty
        if section.mechanism != "mean" or not sizes:
            return []
        typical = int(median(sizes))
        suited = mean.suitable_components(typical, epsilon=section.epsilon, delta=section.delta)
        kept, suited = (min(number, self.feature_width) for number in (section.components, suited))
        if suited / COMPONENTS_OFF < kept < suited * COMPONENTS_OFF:
            return []
        return [
            f"Hint: certainty.components = {section.components}, and about {suited} suit the noise on a client of "
            f"{typical} examples at epsilon {section.epsilon:g}: with more it drowns the scores, with fewer clients "
            "look alike."
        ]

    def render(self) -> list[RenderableType]:
        """Return the tables and sentences, ready to print."""
        return [*(self._table(group) for group in self.groups), *self.sentences()]

    def _table(self, group: MethodsPlan) -> Table:
        table = Table(title=f"{', '.join(group.methods)}: (ε, δ) by client", title_justify="left")
        updates = (
            ("one update", "all, expected", "all, at worst")
            if self.protected_updates
            else ("updates",)
        )
        for column in ("client", "n_i", "scores", "noise / signal", *updates):
            table.add_column(column, justify="right")
        for client in group.clients:
            scores = client.scores
            spent = [
                privacy_budget(*cost)
                for cost in (client.update, client.expected, client.worst)
                if cost is not None
            ]
            table.add_row(
                str(client.client),
                str(client.num_examples),
                "–" if scores is None else privacy_budget(*scores.cost),
                "–"
                if scores is None or math.isinf(scores.cost[0])
                else f"{scores.noise_share:.2g}",
                *(spent if self.protected_updates else ["not protected"]),
            )
        return table


def privacy_plan(
    experiment: ExperimentFields,
    sizes: Sequence[int],
    *,
    input_shape: tuple[int, ...],
    num_negatives: int,
) -> PrivacyPlan:
    """Return what each client will spend, from the sizes n_i of the clients and public numbers alone.

    Raises ValueError where sizes and population disagree, and, with `local.privacy`, where dp-accounting is missing.
    """
    if len(sizes) != experiment.split.num_clients:
        raise ValueError(
            f"{len(sizes)} sizes: split.num_clients = {experiment.split.num_clients} of them are needed"
        )
    present = [client for client, size in enumerate(sizes) if size > 0]
    share = min(1.0, clients_per_round(experiment) / max(1, len(present)))
    expected_rounds = math.ceil(share * experiment.rounds - 1e-9)
    widths = _feature_widths(experiment, input_shape)
    groups = []
    for scores in (True, False):
        methods = tuple(name for name in experiment.method if METHODS[name].scores == scores)
        if methods:
            clients = tuple(
                _client_plan(
                    experiment,
                    client,
                    sizes[client],
                    scores=_score_plan(
                        experiment.certainty, sizes[client], widths[client], num_negatives
                    )
                    if scores
                    else None,
                    expected_rounds=expected_rounds,
                )
                for client in present
            )
            groups.append(MethodsPlan(methods, scores, clients))
    empty = tuple(client for client, size in enumerate(sizes) if size == 0)
    protected = experiment.local.privacy is not None
    return PrivacyPlan(
        experiment.certainty,
        protected,
        experiment.rounds,
        expected_rounds,
        empty,
        tuple(groups),
        max(widths),
    )


def _client_plan(
    experiment: ExperimentFields,
    client: int,
    size: int,
    *,
    scores: ScorePlan | None,
    expected_rounds: int,
) -> ClientPlan:
    privacy = experiment.local.privacy
    if privacy is None:
        return ClientPlan(client, size, scores, None, None, None)
    query, steps = schedule(experiment.local, num_examples=size)

    def together(rounds: int) -> Cost:
        counts = {query: rounds * steps}
        if scores is None:
            return composed_epsilon(counts, delta=privacy.delta), privacy.delta
        if math.isinf(scores.cost[0]):
            return math.inf, max(privacy.delta, scores.cost[1])
        section = experiment.certainty
        counts[Query(noise_multiplier(epsilon=section.epsilon, delta=section.delta))] = 1
        delta = max(privacy.delta, section.delta)
        return composed_epsilon(counts, delta=delta), delta

    update = composed_epsilon({query: steps}, delta=privacy.delta), privacy.delta
    return ClientPlan(
        client, size, scores, update, together(expected_rounds), together(experiment.rounds)
    )


def _score_plan(section: Certainty, size: int, feature_width: int, num_negatives: int) -> ScorePlan:
    """Return the cost of scores; a mechanism that proves no sensitivity has an infinite one and no useful noise."""
    sensitivity: Callable[[int], float]
    if section.mechanism == "mean":
        dimensions, signal = min(section.components, feature_width), 1.0
        sensitivity = mean.sensitivity_of
    elif section.mechanism == "paper":
        # At the optimum lambda |w| is a mean of vectors of norm at most 1, and J(w) <= J(0) = log 2.
        dimensions = feature_width
        signal = min(
            1.0 / section.regularisation, math.sqrt(2.0 * math.log(2.0) / section.regularisation)
        )

        def sensitivity(num_examples: int) -> float:
            return paper.sensitivity_of(
                num_examples, num_negatives, regularisation=section.regularisation
            )
    else:
        return ScorePlan((math.inf, section.delta), 0.0, 1)
    multiplier = noise_multiplier(epsilon=section.epsilon, delta=section.delta)

    def noise_share(num_examples: int) -> float:
        return sensitivity(num_examples) * multiplier * math.sqrt(dimensions) / signal

    cost = section.epsilon, section.delta
    return ScorePlan(cost, noise_share(size), least_examples(noise_share, limit=NOISE_LIMIT))


def least_examples(noise_share: Callable[[int], float], *, limit: float) -> int | None:
    """Return the least n with noise_share(n) <= limit, for a share that falls with n; None above a billion."""
    low, high = 0, 1
    while noise_share(high) > limit:
        low, high = high, 2 * high
        if high > 10**9:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if noise_share(middle) > limit else (low, middle)
    return high


def _feature_widths(experiment: ExperimentFields, input_shape: tuple[int, ...]) -> list[int]:
    """Return the feature width of each client's prototype."""
    widths = {}
    for prototype in experiment.prototypes:
        with seeding.initialisation(0, part=prototype.name):
            widths[prototype.name] = MODELS[prototype.model](
                input_shape, 2, **prototype.options
            ).feature_width
    return [widths[name] for name in assign_prototypes(experiment)]


def _listed(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
    return f"client{'s' if len(clients) != 1 else ''} {shown}"
