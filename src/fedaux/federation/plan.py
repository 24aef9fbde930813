"""The plan of a run: what the server will ask of a node, and what all of it costs there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedaux.config import ExperimentFields
from fedaux.core.algorithms import all_asks
from fedaux.core.asks import release_sections
from fedaux.core.dpsgd import schedule, update_entry
from fedaux.core.server import clients_per_round
from fedaux.federation.node import NodeConfig
from fedaux.federation.policy import BEYOND_BUDGET, Guard, Refusal
from fedaux.federation.terms import Plan
from fedaux.privacy.bounds import STEPS, update_problem
from fedaux.privacy.filters import ROUNDING
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanisms import UNPROTECTED_MECHANISMS, what_is_released


def plan_of(experiment: ExperimentFields, *, run: str) -> Plan:
    """Return the plan of an experiment; with random participation, of the expected rounds."""
    methods = all_asks(experiment).values()
    asked = tuple(release_sections(methods).values())
    trained = [asks for asks in methods if asks.trains]
    named = [one for asks in trained for one in asks.objectives]
    share = clients_per_round(experiment) / experiment.split.num_clients
    rounds = math.ceil(min(1.0, share) * experiment.rounds - 1e-9)
    return Plan(
        run=run,
        certainty=asked,
        releases=len(experiment.seeds) if asked else 0,
        local=experiment.local if trained else None,
        objectives=tuple(dict.fromkeys([*named, *experiment.local.objectives])) if trained else (),
        updates=rounds * len(trained) * len(experiment.seeds),
        public=experiment.auxiliary.source[:200],
    )


def check_plan(
    config: NodeConfig, guard: Guard, plan: Plan, *, num_examples: int, repeats: bool = True
) -> float:
    """Return the total epsilon after a whole run, with what was spent before it.

    Raises Refusal if the node would refuse any part of it. A run that has begun was checked as a
    whole before; from then on each request is checked alone. With `repeats`, earlier releases of
    the same kind count as planned, at no cost: the same recipe may run again. If they
    turn out to be new ones, they are refused one by one.
    """
    for section in plan.certainty:
        guard.check_release(section)
    private = None
    if plan.local is not None and plan.local.privacy is None:
        steps = plan.local.epochs * math.ceil(num_examples / plan.local.batch_size)
        if (problem := STEPS.problem("local.epochs: steps per update", steps)) and steps:
            raise Refusal(problem)
    if plan.local is not None:
        guard.check_update(plan.local, plan.objectives)
        private = plan.local if plan.local.privacy is not None and num_examples > 0 else None
    if private is not None:
        steps = schedule(private, num_examples=num_examples)[1]
        if (problem := update_problem(private, steps=steps)) is not None:
            raise Refusal(problem)
    for section in plan.certainty:
        guard.check_price(section)
    counted = guard.counted()
    if guard.knows(plan.run):
        return guard.spent(counted)
    earlier = guard.entries() if repeats else []
    asked = _releases(config, plan, num_examples=num_examples, earlier=earlier)
    if private is not None and plan.updates > 0:
        one = update_entry(
            private,
            num_examples=num_examples,
            client=config.number,
            noise=config.privacy.noise,
        )
        assert one.steps is not None, "an update of DP-SGD has steps"
        asked.append(replace(one, steps=one.steps * plan.updates))
    total = guard.spent([*counted, *asked])
    terms = config.privacy
    if asked and total > terms.epsilon * (1.0 + ROUNDING):
        hint = ""
        if private is not None and terms.accountant == "gaussian":
            hint = '; privacy.accountant = "renyi" counts DP-SGD more tightly'
        raise Refusal(
            BEYOND_BUDGET,
            detail=f"the whole run, with earlier releases, costs epsilon = {total:.4g} at delta = "
            f"{terms.delta:g}; privacy.epsilon = {terms.epsilon:g}{hint}",
        )
    return total


def _releases(
    config: NodeConfig, plan: Plan, *, num_examples: int, earlier: Sequence[LedgerEntry]
) -> list[LedgerEntry]:
    """Return the releases still to be paid; their cost depends only on sigma over sensitivity."""
    asked: list[LedgerEntry] = []
    for section in plan.certainty:
        if section.mechanism in UNPROTECTED_MECHANISMS:
            continue
        stated = (section.mechanism, section.epsilon, section.delta)
        same = sum((one.mechanism, one.epsilon, one.delta) == stated for one in earlier)
        sigma = noise_multiplier(epsilon=section.epsilon, delta=section.delta)
        planned = (1.0, sigma, section.epsilon, section.delta, "planned")
        what = what_is_released(section)
        entry = LedgerEntry(config.number, num_examples, section.mechanism, what, *planned)
        asked += [entry] * max(0, plan.releases - same)
    return asked
