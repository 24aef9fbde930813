"""`fedaux federate check`: shows a node's operator what the node would do, without a connection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from fedaux.config import ConfigError, Experiment
from fedaux.core.algorithms import METHODS, all_asks
from fedaux.data import LabelledData
from fedaux.federation import sent
from fedaux.federation.node import NodeConfig, load_node
from fedaux.federation.plan import check_plan, plan_of
from fedaux.federation.policy import Guard, Refusal
from fedaux.federation.work import declared_shape, own_data
from fedaux.formatting import privacy_budget
from fedaux.privacy.mechanisms import UNPROTECTED_MECHANISMS, what_is_released
from fedaux.privacy.secure import noise_for
from fedaux.recipes import find_recipe, load_experiment
from fedaux.running.preflight import problems_of

MOST_SHOWN = 100
"""Characters of the name of a class: a label can be anything."""


def check_server(folder: Path) -> list[str]:
    """Return messages about the certificates of a server. Raises ValueError if they are
    missing, or nodes or its own processes would reject them."""
    from fedaux.federation.certificates import warnings_of
    from fedaux.federation.flower_internals.processes import link_arguments, port_of

    port = port_of(folder, simulation=False)
    link_arguments(folder, host="0.0.0.0", port=port, simulation=False)
    certificates = folder / "certificates"
    warnings = [*warnings_of(certificates / "server.pem"), *warnings_of(certificates / "ca.crt")]
    return [f"{certificates}: dates, names, key and chain are right.", *warnings]


def check_connection(file: Path, *, superlink: str | None, certificate: Path | None) -> list[str]:
    """Return messages about a node's connection. Raises ValueError if it would fail."""
    from fedaux.federation.certificates import authority_problems, connection_lines, warnings_of

    authority = certificate or file.parent / "ca.crt"
    if superlink is None and certificate is None and not authority.exists():
        return []
    if problems := authority_problems(authority):
        raise ValueError("\n".join(problems))
    lines = [] if superlink is None else connection_lines(superlink, authority)
    return [*lines, *warnings_of(authority)]


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
    if problems := Guard(config).problems():
        raise ValueError("\n".join(problems))
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
            name = label if label.isprintable() else ascii(label)
            table.add_row(Text(f"{name[:MOST_SHOWN]}{declared}"), str(count))
    return table


def policy_lines(config: NodeConfig) -> list[str]:
    """Return lines on data that may leave this machine or has left it, and on privacy."""
    terms = config.privacy
    guard = Guard(config)
    used = guard.spent(guard.counted())
    taken = "taken and kept in the state" if terms.public_data else "refused"
    lines = [
        "On request of the server, only the following leaves this machine:",
        "- the client's number and name, the version of fedaux, and the number of examples;",
        f"- noisy vectors for certainty scores, by {_listed(terms.mechanisms)};",
        "- trained models, unprotected, and their mean training loss."
        if terms.plain_updates
        else "- trained models, if they were trained with DP-SGD.",
        f"Public images of the server, to rehearse in training, are {taken}.",
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
    guard, seeds = Guard(config), len(experiment.seeds)
    plan = plan_of(experiment, run="check")
    lines: list[str] = []
    for section in plan.certainty:
        cost = privacy_budget(section.epsilon, section.delta)
        lines.append(
            f"- {what_is_released(section)} by {section.mechanism}: (ε, δ) = {cost}, "
            f"{seeds} time{'s' if seeds > 1 else ''}, once per seed;"
        )
    if extra := [name for name in plan.objectives if name != "rehearsal"]:
        lines.append(f"- training with {', '.join(extra)}, besides cross-entropy;")
    if "rehearsal" in plan.objectives:
        count = experiment.rehearsal.examples
        lines.append(
            f"- to keep {f'{count} public images' if count else 'public images'} and rehearse "
            f"{experiment.rehearsal.batch_size} of them in each batch, with the server's soft "
            "labels;"
        )
    protected = experiment.local.privacy is not None
    cells = seeds * sum(asks.trains for asks in all_asks(experiment).values())
    if cells == 0:
        lines.append("- no updates.")
    else:
        lines.append(
            f"- {plan.updates} update{'s' if plan.updates > 1 else ''}, in {experiment.rounds} "
            f"rounds of {cells} method{'s and seeds' if cells > 1 else ' and seed'}, "
            + ("with DP-SGD." if protected else "not protected.")
        )
    try:
        total = check_plan(config, guard, plan, num_examples=num_examples, repeats=False)
    except Refusal as refusal:
        detail = f" ({refusal.detail})" if refusal.detail else ""
        return [*lines, f"REFUSED: {refusal}{detail}"], True
    return [
        *lines,
        f"Within the budget: total ε = {total:.4g} at δ = {config.privacy.delta:g}.",
    ], False


def show_ledger(
    file: Path, console: Console, *, noted: str | None = None, json_lines: bool = False
) -> list[str]:
    """Print what has left a node and what it cost; return what does not fit in its record."""
    config = load_node(file)
    guard, terms = Guard(config), config.privacy
    problems = guard.problems(noted=noted)
    if json_lines:
        for stored in sent.lines(config.folder):
            console.out(stored, highlight=False)
        return problems
    table = Table()
    for name in ("no.", "time", "what", "run", "round", "bytes", "SHA-256", "ε"):
        table.add_column(name, justify="right" if name in {"no.", "round", "bytes"} else "left")
    lines = [] if problems else guard.sent_lines()
    for line in lines:
        entry = line["entry"]
        table.add_row(
            *(str(line["number"]), line["when"], line["kind"], line["run"][:40]),
            *("" if line["round"] is None else str(line["round"]), str(line["bytes"])),
            *(line["digest"][:16], "" if entry is None else f"{float(entry['epsilon']):.4g}"),
        )
    if lines:
        console.print(table)
    if not problems:
        console.out(
            f"{len(lines)} answers left; the record is complete and unchanged, if its last hash is "
            f"the one that you know:\n{guard.head()}",
            highlight=False,
        )
    console.out(
        f"Budget: ε = {terms.epsilon:g} at δ = {terms.delta:g}, of which "
        f"{guard.spent(guard.counted()):.4g} is spent ({config.folder}).",
        highlight=False,
    )
    return problems


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "none"
