"""The privacy cost of each client, before anything runs: `fedaux privacy RECIPE`.

It depends only on the numbers of examples n_i, which are public under the neighbouring relation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from rich.console import RenderableType

from fedaux import seeding
from fedaux.config import MEAN_COMPONENTS, Certainty, ExperimentFields
from fedaux.core.algorithms import all_asks
from fedaux.core.asks import unprotected_by
from fedaux.core.dpsgd import schedule
from fedaux.core.server import clients_per_round
from fedaux.core.task import assign_prototypes
from fedaux.formatting import UNKNOWN, interval, privacy_budget
from fedaux.models import MODELS
from fedaux.privacy import classes, mean
from fedaux.privacy.accounting import Query, composed_epsilon
from fedaux.privacy.gaussian import epsilon_of, noise_multiplier
from fedaux.privacy.ledger import NEIGHBOURS, SCORES
from fedaux.privacy.mechanisms import MECHANISMS, UNPROTECTED_MECHANISMS, what_is_released
from fedaux.report.tables import Table, TerminalTable

NOISE_LIMIT = 0.5
"""Warn if the norm of the noise is above this share of the largest possible signal."""
COMPONENTS_OFF = 2.0
"""Give a hint if there are this many times more or fewer components than suitable."""

Cost = tuple[float, float]
"""(epsilon, delta)."""


@dataclass(frozen=True)
class ScorePlan:
    """Privacy cost and noise level of a client's certainty scores."""

    cost: Cost
    noise_share: float
    """Norm of the noise, sigma sqrt(k), over the largest possible norm of the signal."""
    enough_examples: int | None
    """The smallest n_i with a noise share of at most NOISE_LIMIT; None if there is none."""


@dataclass(frozen=True)
class ClientPlan:
    """The privacy cost of one client."""

    client: int
    num_examples: int
    scores: ScorePlan | None
    update: Cost | None
    """One round of local training; None if updates are not protected."""
    expected: Cost | None
    """In total, for the expected number of rounds; None if updates are not protected."""
    worst: Cost | None
    """In total, if selected in every round; None if updates are not protected."""


@dataclass(frozen=True)
class MethodsPlan:
    """The clients of methods with the same privacy cost."""

    methods: tuple[str, ...]
    certainty: Certainty | None
    """The settings of the release, if there is one; `components` is the number in use."""
    clients: tuple[ClientPlan, ...]
    trains: bool = True
    reliability: tuple[float, float] | None = None
    """Mechanism `classes`: the expected reliability if every client holds all classes, and if each
    holds one."""
    heads: tuple[Cost, Cost] | None = None
    """The price of a client's linear head, and of head and scores together."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The privacy cost of a recipe."""

    protected_updates: bool
    rounds: int
    expected_rounds: int
    empty_clients: tuple[int, ...]
    groups: tuple[MethodsPlan, ...]
    feature_width: int
    """The maximum over prototypes."""
    unprotected: str
    """The parts that are not covered."""
    names: tuple[str, ...] = ()
    """The clients' names, if they have any."""

    def warnings(self) -> list[str]:
        """Return a warning for each release that noise drowns, with the methods that rest on it.

        A method that trains is not warned of class sums: it learns what noise hides in them.
        """
        methods: dict[str, list[str]] = {}
        for group in self.groups:
            by_need: dict[int | None, list[ClientPlan]] = {}
            for client in group.clients if group.reliability is None else ():
                if client.scores is not None and client.scores.noise_share > NOISE_LIMIT:
                    by_need.setdefault(client.scores.enough_examples, []).append(client)
            lines = []
            for needed, members in by_need.items():
                assert group.certainty is not None, "clients without a release have no scores"
                lines.append(self._warning(group.certainty, needed, members))
            if group.reliability is not None and max(group.reliability) < classes.HOPELESS:
                lines += [line for line in [_outlook(group)] if line]
            for line in lines:
                methods.setdefault(line, []).extend(group.methods)  # groups may share a release
        return [f"Warning: {', '.join(names)}: {line}" for line, names in methods.items()]

    def _warning(
        self, section: Certainty, needed: int | None, members: Sequence[ClientPlan]
    ) -> str:
        sizes = [member.num_examples for member in members]
        shares = [member.scores.noise_share for member in members if member.scores is not None]
        advice = MECHANISMS[section.mechanism](section).remedy
        remedy = (
            f"would take {needed} examples"
            if needed is not None
            else "is out of reach of any number of examples"
        )
        return (
            f"{'doubtful' if min(shares) <= 1 else 'hopeless'} {what_is_released(section)} of "
            f"{_listed([member.client for member in members], self.names)} with {interval(sizes)} "
            f"examples: their noise is {interval(shares)} times the largest possible signal. "
            f"A good ratio, {NOISE_LIMIT:g}, {remedy} at epsilon = {section.epsilon:g}; {advice}."
        )

    def sentences(self) -> list[str]:
        """Return the assumptions of the tables, warnings and hints."""
        lines = [f"Neighbours are {NEIGHBOURS}."]
        for group in self.groups:
            scored = [client.scores for client in group.clients if client.scores is not None]
            if group.certainty and any(math.isinf(scores.cost[0]) for scores in scored):
                name = group.certainty.mechanism
                what = f"NOT PRIVATE: certainty scores by `{name}` have no finite ε."
                if name not in UNPROTECTED_MECHANISMS:
                    what = (
                        f"`{name}` states its price with each release; until then it counts as ∞."
                    )
                lines.insert(0, what)
        warned = "".join(self.warnings())
        outlooks = ((group.methods, _outlook(group)) for group in self.groups)
        lines += [
            f"{', '.join(methods)}: {line}" for methods, line in outlooks if line not in warned
        ]
        if self.empty_clients:
            lines.append(f"No examples, never selected: {_listed(self.empty_clients, self.names)}.")
        if self.protected_updates:
            lines.append(
                f"A client is selected in {self.expected_rounds} of {self.rounds} rounds in "
                "expectation, in all at worst; scores and updates are composed by privacy loss "
                "distributions."
            )
        lines.append(f"Not protected: {self.unprotected}")
        return [*lines, *self.warnings(), *self._hints()]

    def _hints(self) -> list[str]:
        """Suggest a number of components that suits the noise, if it is very different."""
        scoring = [group for group in self.groups if group.certainty is not None]
        chosen = [group for group in scoring if group.certainty.mechanism == Certainty().mechanism]  # type: ignore[union-attr]
        if not chosen or not chosen[0].clients:
            return []
        section = chosen[0].certainty
        assert section is not None, "chosen by it"
        given = section.components or MEAN_COMPONENTS
        typical = int(median([client.num_examples for client in chosen[0].clients]))
        suited = mean.suitable_components(typical, epsilon=section.epsilon, delta=section.delta)
        kept, suited = (min(number, self.feature_width) for number in (given, suited))
        if suited / COMPONENTS_OFF < kept < suited * COMPONENTS_OFF:
            return []
        return [
            f"Hint: certainty.components = {given}; for the scores of "
            f"{', '.join(chosen[0].methods)} about {suited} suit a client with {typical} examples "
            f"at epsilon = {section.epsilon:g}. More components add noise, fewer distinguish "
            "clients less. Methods with class sums choose their own number unless one is given."
        ]

    def render(self) -> list[RenderableType]:
        """Return the tables and sentences, ready to print."""
        return [*(self._table(group) for group in self.groups), *self.sentences()]

    def _table(self, group: MethodsPlan) -> TerminalTable:
        what = SCORES if group.certainty is None else what_is_released(group.certainty)
        headers = ["client", "n_i", "scores" if what == SCORES else what, "noise / signal"]
        if group.heads is not None:
            headers += ["head", "total"]
        elif not group.trains:
            headers += ["updates"]
        elif self.protected_updates:
            headers += ["one update", "total, expected", "total, at worst"]
        else:
            headers += ["updates"]
        about_updates = "not protected" if group.trains else "none"
        rows = []
        for client in group.clients:
            scores, spent = client.scores, (client.update, client.expected, client.worst)
            finite = scores is not None and not math.isinf(scores.cost[0])
            rows.append(
                [
                    self.names[client.client] if self.names else client.client,
                    client.num_examples,
                    UNKNOWN if scores is None else privacy_budget(*scores.cost),
                    f"{scores.noise_share:.2g}" if scores is not None and finite else UNKNOWN,
                    *(privacy_budget(*cost) for cost in spent if cost is not None),
                    *(privacy_budget(*cost) for cost in group.heads or ()),
                    *([] if client.update or group.heads else [about_updates]),
                ]
            )
        caption = f"{', '.join(group.methods)}: (ε, δ) by client"
        first = "l" if self.names else "r"
        return TerminalTable(Table(headers, rows, first + "r" * (len(headers) - 1), caption))


def privacy_plan(
    experiment: ExperimentFields,
    sizes: Sequence[int],
    *,
    input_shape: tuple[int, ...],
    num_negatives: int,
    num_classes: int,
) -> PrivacyPlan:
    """Return the privacy cost of each client from the sizes n_i and other public numbers.

    Raises ValueError if there is not one size per client or, with `local.privacy`, dp-accounting is
    not installed.
    """
    if len(sizes) != experiment.split.num_clients:
        raise ValueError(
            f"{len(sizes)} sizes: should be {experiment.split.num_clients}, split.num_clients"
        )
    present = [client for client, size in enumerate(sizes) if size > 0]
    share = min(1.0, clients_per_round(experiment) / max(1, len(present)))
    expected_rounds = math.ceil(share * experiment.rounds - 1e-9)
    widths = _feature_widths(experiment, input_shape)
    known = [sizes[client] for client in present]
    # Methods with a release first; methods that share a release, or have none, form a group.
    asked = all_asks(experiment)
    alike: dict[tuple[str, bool], list[str]] = {}
    for name in sorted(asked, key=lambda name: not asked[name].all_releases):
        mechanisms = "+".join(section.mechanism for section in asked[name].all_releases)
        alike.setdefault((mechanisms, asked[name].trains), []).append(name)
    groups = []
    for (_, trains), methods in alike.items():
        section, *further = asked[methods[0]].all_releases or (None,)
        reliability = None
        mechanism = None if section is None else MECHANISMS[section.mechanism](section)
        if section is not None and mechanism is not None and mechanism.scores == "together":
            budget = {"epsilon": section.epsilon, "delta": section.delta}
            components = min(
                max(widths),
                section.components
                or classes.suitable_components(known, num_classes=num_classes, **budget),
            )
            section = section.model_copy(update={"components": components})
            worst, best = (
                classes.expected_reliability(
                    components, known, num_classes=num_classes, held=held, **budget
                )
                for held in (num_classes, 1)
            )
            reliability = (worst, best)
        clients = tuple(
            _client_plan(
                experiment,
                client,
                sizes[client],
                scores=None
                if section is None
                else _score_plan(
                    section,
                    sizes[client],
                    feature_width=widths[client],
                    num_negatives=num_negatives,
                    num_classes=num_classes,
                ),
                expected_rounds=expected_rounds,
                trains=trains,
            )
            for client in present
        )
        priced = _head_costs(section, further[0], clients) if section and further else None
        groups.append(MethodsPlan(tuple(methods), section, clients, trains, reliability, priced))
    empty = tuple(client for client, size in enumerate(sizes) if size == 0)
    protected = experiment.local.privacy is not None
    return PrivacyPlan(
        protected,
        experiment.rounds,
        expected_rounds,
        empty,
        tuple(groups),
        max(widths),
        unprotected_by(asked.values(), experiment),
        experiment.data.client_names,
    )


def _head_costs(
    section: Certainty, head: Certainty, clients: Sequence[ClientPlan]
) -> tuple[Cost, Cost]:
    """Return the price of a client's head, and of head and scores together."""
    delta = section.delta
    cost = head.epsilon, head.delta
    if any(one.scores is not None and math.isinf(one.scores.cost[0]) for one in clients):
        return cost, (math.inf, delta)
    multipliers = [
        noise_multiplier(epsilon=one.epsilon, delta=one.delta) for one in (section, head)
    ]
    together = 1.0 / math.sqrt(math.fsum(one**-2 for one in multipliers))
    return cost, (epsilon_of(together, delta=delta), delta)


def _outlook(group: MethodsPlan) -> str:
    """Return how good a head of class sums can be, from public numbers alone; empty where there is
    none, or where clients train it further."""
    if group.reliability is None or group.certainty is None or group.trains:
        return ""
    worst, best = group.reliability
    verdict, remedy = "good", ""
    if best < classes.HOPELESS:
        verdict = "hopeless"
        remedy = "; raise certainty.epsilon, use more data or lower certainty.components"
    elif best < classes.RELIABLE:
        verdict = "doubtful"
    elif worst < classes.RELIABLE:
        verdict = "good where clients hold few classes, otherwise doubtful"
    return (
        f"{verdict} class sums with {group.certainty.components} components: the expected share of "
        f"signal in the class means is {worst:.2f} if every client holds all classes and "
        f"{best:.2f} if each holds one (good from {classes.RELIABLE:g}, hopeless below "
        f"{classes.HOPELESS:.2f}){remedy}."
    )


def noise_warnings(
    experiment: ExperimentFields,
    sizes: Sequence[int],
    *,
    input_shape: tuple[int, ...],
    num_negatives: int,
    num_classes: int,
) -> list[str]:
    """Return the warnings of the privacy plan, without the costs of private updates."""
    if not any(asks.all_releases for asks in all_asks(experiment).values()):
        return []
    local = experiment.local.model_copy(update={"privacy": None})
    plan = privacy_plan(
        experiment.model_copy(update={"local": local}),
        sizes,
        input_shape=input_shape,
        num_negatives=num_negatives,
        num_classes=num_classes,
    )
    return [line.removeprefix("Warning: ") for line in plan.warnings()]


def _client_plan(
    experiment: ExperimentFields,
    client: int,
    size: int,
    *,
    scores: ScorePlan | None,
    expected_rounds: int,
    trains: bool,
) -> ClientPlan:
    privacy = experiment.local.privacy
    if privacy is None or not trains:
        return ClientPlan(client, size, scores, None, None, None)
    query, steps = schedule(experiment.local, num_examples=size)

    def together(rounds: int) -> Cost:
        queries = {query: rounds * steps}
        if scores is None:
            return composed_epsilon(queries, delta=privacy.delta), privacy.delta
        if math.isinf(scores.cost[0]):
            return math.inf, max(privacy.delta, scores.cost[1])
        section = experiment.certainty
        queries[Query(noise_multiplier(epsilon=section.epsilon, delta=section.delta))] = 1
        delta = max(privacy.delta, section.delta)
        return composed_epsilon(queries, delta=delta), delta

    update = composed_epsilon({query: steps}, delta=privacy.delta), privacy.delta
    return ClientPlan(
        client, size, scores, update, together(expected_rounds), together(experiment.rounds)
    )


@cache  # many clients have the same number of examples
def _score_plan(section: Certainty, size: int, **sizes: int) -> ScorePlan:
    """Return the cost of a release of n = `size` examples; infinite without a proved sensitivity.

    `sizes` are the other arguments of `Mechanism.noise_share`."""
    mechanism = MECHANISMS[section.mechanism](section)

    def noise_share(num_examples: int) -> float | None:
        return mechanism.noise_share(num_examples, **sizes)

    share = noise_share(size)
    if share is None:
        return ScorePlan((math.inf, section.delta), 0.0, 1)
    cost = section.epsilon, section.delta
    enough = least_examples(lambda count: noise_share(count) or 0.0, limit=NOISE_LIMIT)
    return ScorePlan(cost, share, enough)


def least_examples(noise_share: Callable[[int], float], *, limit: float) -> int | None:
    """Return the smallest n with noise_share(n) <= limit, for a decreasing share; None above
    1e9."""
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


def _listed(clients: Sequence[int], names: Sequence[str]) -> str:
    if names:
        return ", ".join(names[client] for client in clients[:8]) + ", ..." * (len(clients) > 8)
    shown = ", ".join(map(str, clients[:8])) + (", ..." if len(clients) > 8 else "")
    return f"client{'s' if len(clients) != 1 else ''} {shown}"
