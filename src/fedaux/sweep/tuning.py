"""The fair search for local optimizers: every method gets the best of one small grid, chosen on
validation examples that are held out from the clients' training data.

The run of the search sees no test data: its loader puts the validation examples in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import tomli_w

from fedaux.config import LINEAR_RATES, Experiment, Local
from fedaux.core.algorithms import METHODS, asks_of
from fedaux.core.task import Callback
from fedaux.files import replacing
from fedaux.report.tables import Table
from fedaux.running.run import Inputs, load_inputs, run

ADAM_FACTORS = (0.1, 0.3, 1.0, 3.0)
"""Candidates, in units of the recipe's learning rate, or the default where the recipe has SGD."""
SGD_RATES = (0.03, 0.1, 0.3)
HELD_OUT = 5
"""One of this many training examples is held out for validation."""
RECIPE = "tuned.toml"


def candidates(experiment: Experiment) -> dict[str, list[str]]:
    """Return the variants of each method to try, `NAME@OPTIMIZER-RATE`; none if it does not train.

    Optimizers that a method refuses are left out, such as Adam for SCAFFOLD.
    """
    local = experiment.local
    if local.optimizer == "adam":
        rate = local.learning_rate
    else:
        rate = LINEAR_RATES["adam"] if experiment.mode == "linear" else Local().learning_rate
    grid = [f"adam-{factor * rate:g}" for factor in ADAM_FACTORS]
    grid += [f"sgd-{rate:g}" for rate in SGD_RATES]
    found: dict[str, list[str]] = {}
    for name in experiment.method:
        base = name.partition("@")[0]
        names = [f"{base}@{own}" for own in grid] if asks_of(base).trains else []
        found[name] = [
            one for one in names if not METHODS[one].problems(METHODS[one].own_settings(experiment))
        ]
    return found


def on_validation(experiment: Experiment) -> Inputs:
    """Load the inputs of an experiment with a fifth of all training examples, drawn at random, in
    the place of the test data."""
    inputs = load_inputs(experiment)
    held = inputs.data.with_validation(max(1, len(inputs.data.labels) // HELD_OUT))
    assert held.validation is not None, "examples were held out"
    images, labels = held.validation
    data = replace(held, test_images=images, test_labels=labels, validation=inputs.data.validation)
    return replace(inputs, data=data)


def search_of(experiment: Experiment, *, rounds: int | None = None) -> Experiment:
    """Return the run that tries all candidates. Raises ValueError if no method trains."""
    names = dict.fromkeys(one for own in candidates(experiment).values() for one in own)
    if not names:
        raise ValueError("method: none of these methods trains, so there is nothing to tune")
    name, rounds = f"{experiment.name}-tune", rounds or experiment.rounds
    changes = {"name": name, "method": tuple(names), "rounds": rounds}
    return experiment.model_copy(update=changes)


def tune(
    experiment: Experiment,
    search: Experiment,
    *,
    out: Path,
    resume: bool = False,
    callback: Callback | None = None,
) -> Table:
    """Run a search; write OUT/tuned.toml, and return a table of each method's best candidate.

    The recipe that is written has each method as it was and, beside it, with its best optimizer.
    The best has the highest mean accuracy of the last round over the recipe's seeds.
    """
    tried = candidates(experiment)
    result = run(
        search, out=out, resume=resume, load=on_validation, callback=callback, progress=False
    )
    reached = {row["method"]: row for row in result.summary["rows"]}
    best = {
        name: max(own, key=lambda one: float(reached[one]["accuracy_mean"]))
        for name, own in tried.items()
        if own
    }
    methods = tuple(dict.fromkeys(one for name in tried for one in (name, best.get(name, name))))
    tuned = experiment.model_copy(update={"name": f"{experiment.name}-tuned", "method": methods})
    with replacing(out / RECIPE) as temporary:
        temporary.write_text(tomli_w.dumps(tuned.to_dict()), encoding="utf-8")
    return best_table(best, reached)


def best_table(best: Mapping[str, str], reached: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the best optimizer of each method with its validation accuracy."""
    rows = []
    for name, own in best.items():
        optimizer, _, rate = own.partition("@")[2].partition("-")
        row = reached[own]
        accuracy = f"{100 * row['accuracy_mean']:.1f} ± {100 * row['accuracy_std']:.1f}"
        rows.append([name, optimizer, rate, accuracy])
    return Table(["method", "optimizer", "rate", "validation accuracy in %"], rows, "llrr")
