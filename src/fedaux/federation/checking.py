"""What a node would do, told to its operator before anything is connected: `fedaux federate check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from fedaux.config import ConfigError, Experiment
from fedaux.core.dpsgd import schedule, update_entry
from fedaux.core.methods import METHODS
from fedaux.data import LabelledData
from fedaux.federation.node import UNPROTECTED_MECHANISMS, NodeConfig, load_node
from fedaux.federation.policy import Guard, Refusal
from fedaux.federation.work import declared_shape, own_data, update_noise
from fedaux.formatting import privacy_budget
from fedaux.privacy.bounds import update_problem
from fedaux.privacy.filters import ROUNDING
from fedaux.privacy.gaussian import noise_multiplier
from fedaux.privacy.ledger import SCORES, LedgerEntry
from fedaux.privacy.secure import noise_for
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.preflight import problems_of


def check_node(file: Path, *, recipe: str | None = None) -> tuple[list[RenderableType], bool]:
    """Return what there is to say about a node, and whether it would do what the recipe asks.

    Raises ConfigError or ValueError where its configuration or its data cannot be used.
    """
    config = load_node(file)
    data, total = own_data(config)
    if total > len(data.labels) and not config.data.skip_bad:
        raise ValueError(
            f"data: {total - len(data.labels)} of {total} rows cannot be read; mend them, or set data.skip_bad = true: "
            "then they count as examples and contribute nothing"
        )
    shape = " x ".join(map(str, declared_shape(config)))
    name = f", {config.name}" if config.name else ""
    heading = f"Client {config.number}{name}: {total} examples, images {shape}"
    said: list[RenderableType] = [
        *warning_lines(config),
        heading,
        class_table(data, config),
        *policy_lines(config),
    ]
    if total > len(data.labels):
        said.append(
            f"{total - len(data.labels)} rows cannot be read: they count as examples and contribute nothing."
        )
    if total == 0:
        said.append("Warning: there are no examples here; the node would have nothing to do.")
    if config.privacy.noise == "secure":
        noise_for(deployment=True)  # says what to install where it cannot be drawn
    if recipe is None:
        return said, True
    experiment = load_experiment(find_recipe(recipe))
    if unknown := [name for name in experiment.method if name not in METHODS]:
        # Only what concerns a node: the server's files are elsewhere.
        raise ConfigError(
            [line for line in problems_of(experiment) if unknown[0] in line], origin=recipe
        )
    lines, refused = recipe_lines(config, experiment, num_examples=total)
    return [*said, "", f"{recipe} would ask:", *lines], not refused


def warning_lines(config: NodeConfig) -> list[str]:
    """Say first what makes the budget meaningless."""
    lines = []
    if config.privacy.plain_updates:
        lines.append(
            "NOT PROTECTED: privacy.plain_updates = true lets trained models leave without differential privacy. A "
            "hostile server can read private data out of them; the budget below covers the certainty scores alone."
        )
    if config.privacy.noise != "secure":
        lines.append(
            "NOT PRIVATE: privacy.noise = simulated is known to the server. For trials alone."
        )
    return lines


def class_table(data: LabelledData, config: NodeConfig) -> Table:
    """Return what the node holds, and which of it does not take part."""
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
    """Say what may leave this machine, what has left it, and what protects nobody."""
    terms = config.privacy
    guard = Guard(config)
    used = guard.spent(guard.counted())
    lines = [
        "Leaves this machine when the server asks for it, and nothing else does:",
        "- the client's number and name, the version of fedaux, and the number of examples;",
        f"- noisy vectors for certainty scores, by {_listed(terms.mechanisms)};",
        "- trained models, as they are, and their mean training loss."
        if terms.plain_updates
        else "- trained models, if they were trained with DP-SGD.",
        f"Budget: ε = {terms.epsilon:g} at δ = {terms.delta:g}, of which {used:.4g} is spent "
        f"({len(guard.entries())} releases, in {config.folder}).",
    ]
    if unprotected := [name for name in terms.mechanisms if name in UNPROTECTED_MECHANISMS]:
        lines.append(
            f"NOT PRIVATE: privacy.mechanisms allows {_listed(unprotected)}, which no budget counts."
        )
    if config.split is not None:
        lines.append("A trial: [split] gives this node a part of data that is not its own.")
    return lines


def recipe_lines(
    config: NodeConfig, experiment: Experiment, *, num_examples: int
) -> tuple[list[str], bool]:
    """Say what a recipe would cost this node, and what the node would refuse."""
    guard, terms = Guard(config), config.privacy
    section, seeds, rounds = experiment.certainty, len(experiment.seeds), experiment.rounds
    lines: list[str] = []
    asked: list[LedgerEntry] = []
    try:
        if any(METHODS[name].scores for name in experiment.method):
            cost = privacy_budget(section.epsilon, section.delta)
            lines.append(
                f"- certainty scores by {section.mechanism}: (ε, δ) = {cost}, "
                f"{seeds} time{'s' if seeds > 1 else ''}, one a seed;"
            )
            guard.check_release(section)
            if section.mechanism not in UNPROTECTED_MECHANISMS:
                asked += [_score_entry(experiment, config.number, num_examples)] * seeds
        cells = seeds * len(experiment.method)
        lines.append(
            f"- updates in up to {rounds} rounds of {cells} method{'s and seeds' if cells > 1 else ' and seed'}, "
            + ("not protected." if experiment.local.privacy is None else "by DP-SGD.")
        )
        guard.check_update(experiment.local, None)
        if experiment.local.privacy is not None and num_examples > 0:
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
                f"all of it, if this client is asked in every round, comes to ε = {together:.4g} at "
                f"δ = {terms.delta:g} with what was spent before; the budget is {terms.epsilon:g}{hint}"
            )
    except Refusal as refusal:
        return [*lines, f"REFUSED: {refusal}"], True
    return [
        *lines,
        f"Within the budget: together ε = {together:.4g} at δ = {terms.delta:g}.",
    ], False


def _score_entry(experiment: Experiment, client: int, num_examples: int) -> LedgerEntry:
    """Return a release as it will be booked; prices compose by noise over sensitivity alone."""
    section = experiment.certainty
    sigma = noise_multiplier(epsilon=section.epsilon, delta=section.delta)
    return LedgerEntry(
        client=client,
        num_examples=num_examples,
        mechanism=section.mechanism,
        purpose=SCORES,
        sensitivity=1.0,
        sigma=sigma,
        epsilon=section.epsilon,
        delta=section.delta,
        noise="planned",
    )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "none"
