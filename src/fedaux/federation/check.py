"""`fedaux federate check`: shows a node's operator what the node would do, without a connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from fedaux.config import Certainty, ConfigError, Experiment
from fedaux.core.dpsgd import schedule, update_entry
from fedaux.core.methods import METHODS, release_sections
from fedaux.data import LabelledData
from fedaux.federation.node import UNPROTECTED_MECHANISMS, NodeConfig, load_node
from fedaux.federation.policy import Guard, Refusal
from fedaux.federation.work import declared_shape, own_data, update_noise
from fedaux.formatting import privacy_budget
from fedaux.privacy.bounds import update_problem
from fedaux.privacy.filters import ROUNDING
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import SCORES, LedgerEntry, purpose_of
from fedaux.privacy.mechanisms import MECHANISMS
from fedaux.privacy.secure import noise_for
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.preflight import problems_of


def check_node(file: Path, *, recipe: str | None = None) -> tuple[list[RenderableType], bool]:
    """Return a description of a node, and whether it would accept the recipe.

    Raises ConfigError or ValueError if its configuration or its data cannot be used.
    """
    config = load_node(file)
    data, total = own_data(config)
    if total > len(data.labels) and not config.data.skip_bad:
        raise ValueError(
            f"data: {total - len(data.labels)} of {total} rows cannot be read; repair them, or set "
            "data.skip_bad = true: then they count as examples and contribute nothing"
        )
    shape = " x ".join(map(str, declared_shape(config)))
    name = f", {config.name}" if config.name else ""
    heading = f"Client {config.number}{name}: {total} examples, images {shape}"
    shown: list[RenderableType] = [*warning_lines(config), heading]
    shown += [class_table(data, config), *policy_lines(config)]
    if unreadable := total - len(data.labels):
        shown.append(
            f"{unreadable} rows cannot be read: they count as examples and contribute nothing."
        )
    if total == 0:
        shown.append("Warning: this node has no examples.")
    if config.privacy.noise == "secure":
        noise_for(deployment=True)  # raises an error if OpenDP is not installed
    if recipe is None:
        return shown, True
    experiment = load_experiment(find_recipe(recipe))
    if unknown := [name for name in experiment.method if name not in METHODS]:
        # Only the methods: the server's files are not available here.
        raise ConfigError(
            [line for line in problems_of(experiment) if unknown[0] in line], origin=recipe
        )
    lines, refused = recipe_lines(config, experiment, num_examples=total)
    return [*shown, "", f"{recipe} would request:", *lines], not refused


def warning_lines(config: NodeConfig) -> list[str]:
    """Return warnings about settings that make the budget meaningless."""
    lines = []
    if config.privacy.plain_updates:
        lines.append(
            "NOT PROTECTED: privacy.plain_updates = true lets trained models leave without "
            "differential privacy. A hostile server can extract private data from them; the budget "
            "below covers the certainty scores only."
        )
    if config.privacy.noise != "secure":
        lines.append(
            "NOT PRIVATE: privacy.noise = simulated is known to the server. For trials only."
        )
    return lines


def class_table(data: LabelledData, config: NodeConfig) -> Table:
    """Return the number of examples per class, and which classes are not declared."""
    table = Table()
    table.add_column("class")
    table.add_column("examples", justify="right")
    counts = np.bincount(data.labels.numpy(), minlength=len(data.classes))
    for label, count in zip(data.classes, counts, strict=True):
        if count:
            declared = "" if label in config.classes else " (not in `classes`: contributes nothing)"
            table.add_row(f"{label}{declared}", str(count))
    return table


def policy_lines(config: NodeConfig) -> list[str]:
    """Return what may leave this machine, what has left it, and what is not private."""
    terms = config.privacy
    guard = Guard(config)
    used = guard.spent(guard.counted())
    lines = [
        "On request of the server, only the following leaves this machine:",
        "- the client's number and name, the version of fedaux, and the number of examples;",
        f"- noisy vectors for certainty scores, by {_listed(terms.mechanisms)};",
        "- trained models, unprotected, and their mean training loss."
        if terms.plain_updates
        else "- trained models, if they were trained with DP-SGD.",
        f"Budget: ε = {terms.epsilon:g} at δ = {terms.delta:g}, of which {used:.4g} is spent "
        f"({len(guard.entries())} releases, in {config.folder}).",
    ]
    if unprotected := [name for name in terms.mechanisms if name in UNPROTECTED_MECHANISMS]:
        lines.append(
            f"NOT PRIVATE: privacy.mechanisms allows {_listed(unprotected)}, which the budget does "
            "not cover."
        )
    if config.split is not None:
        lines.append("A trial: [split] gives this node a part of the recipe's data.")
    return lines


def recipe_lines(
    config: NodeConfig, experiment: Experiment, *, num_examples: int
) -> tuple[list[str], bool]:
    """Return the cost of a recipe for this node or its refusal, and whether it is refused."""
    guard, terms = Guard(config), config.privacy
    seeds, rounds = len(experiment.seeds), experiment.rounds
    lines: list[str] = []
    asked: list[LedgerEntry] = []
    try:
        for section in release_sections(experiment.method, experiment.certainty).values():
            cost = privacy_budget(section.epsilon, section.delta)
            known = section.mechanism in MECHANISMS
            what = purpose_of(MECHANISMS[section.mechanism](section)) if known else SCORES
            lines.append(
                f"- {what} by {section.mechanism}: (ε, δ) = {cost}, "
                f"{seeds} time{'s' if seeds > 1 else ''}, once per seed;"
            )
            guard.check_release(section)
            if section.mechanism not in UNPROTECTED_MECHANISMS:
                asked += [_release_entry(section, config.number, num_examples)] * seeds
        cells = seeds * sum(METHODS[name].trains for name in experiment.method)
        if cells == 0:
            lines.append("- no updates.")
        else:
            lines.append(
                f"- updates in up to {rounds} rounds of {cells} "
                f"method{'s and seeds' if cells > 1 else ' and seed'}, "
                + ("not protected." if experiment.local.privacy is None else "with DP-SGD.")
            )
            guard.check_update(experiment.local, None)
        if cells > 0 and experiment.local.privacy is not None and num_examples > 0:
            steps = schedule(experiment.local, num_examples=num_examples)[1]
            if (problem := update_problem(experiment.local, steps=steps)) is not None:
                raise Refusal(problem)
            noise = update_noise(config)
            one = update_entry(
                experiment.local, num_examples=num_examples, client=config.number, noise=noise
            )
            asked += [one] * (rounds * cells)
        together = guard.spent([*guard.counted(), *asked]) if asked else 0.0
        if together > terms.epsilon * (1.0 + ROUNDING):
            hint = ""
            if experiment.local.privacy is not None and terms.accountant == "gaussian":
                hint = '; privacy.accountant = "renyi" counts DP-SGD more tightly'
            raise Refusal(
                "if this client takes part in every round, the total including earlier releases is "
                f"ε = {together:.4g} at δ = {terms.delta:g}; the budget is {terms.epsilon:g}{hint}"
            )
    except Refusal as refusal:
        return [*lines, f"REFUSED: {refusal}"], True
    return [*lines, f"Within the budget: total ε = {together:.4g} at δ = {terms.delta:g}."], False


def _release_entry(section: Certainty, client: int, num_examples: int) -> LedgerEntry:
    """Return the planned release; its cost depends only on sigma over sensitivity."""
    sigma = noise_multiplier(epsilon=section.epsilon, delta=section.delta)
    planned = (1.0, sigma, section.epsilon, section.delta)
    return LedgerEntry(client, num_examples, section.mechanism, SCORES, *planned, "planned")


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "none"
