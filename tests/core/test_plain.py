"""The algorithm written out against the golden run.

Its parts have no tests against loops: the product's parts have, and its rounds equal these rounds
(test_methods.py).
"""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import written_out as plain
from helpers.experiments import WHOLE, tiny
from helpers.federations import federation, h0_of, written_out
from helpers.paths import GOLDEN
from written_out import parts as plain_parts

from fedaux.config import ExperimentFields
from fedaux.core.algorithms import METHODS


@pytest.mark.quickly("fedavg", "fedaux+m")
@pytest.mark.parametrize(
    "method", dict.fromkeys(row["method"] for row in json.loads(GOLDEN.read_text()))
)
def test_whole_runs_have_the_golden_figures(method: str, tmp_path: Path) -> None:
    golden = [row for row in json.loads(GOLDEN.read_text()) if row["method"] == method]
    server, state, _, _ = federation(
        tmp_path,
        method=method,
        participation_rate=0.75,
        split={"alpha": 0.3},
        data=WHOLE,
    )
    task, _, _ = written_out(server, state)
    last, rows = plain.run(task, extractors=h0_of(server, state))
    assert last.round == len(rows) == len(golden) == 3
    for row, expected in zip(rows, golden, strict=True):
        assert row["clients"] == expected["clients_answered"]
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert row["accuracy"] == pytest.approx(
            expected["accuracy"], abs=3 / 359
        )  # three test images


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"local": {"privacy": {}}}, "local.privacy"),
        ({"distillation": {"steps": 3}}, "distillation.steps"),
    ],
)
def test_settings_that_are_left_out_are_refused(changes: dict[str, Any], name: str) -> None:
    plain.require_covered(tiny(method=list(METHODS), mode="full"))
    with pytest.raises(ValueError, match=rf"{name}: not part of the algorithm written out"):
        plain.require_covered(ExperimentFields(**changes))


def test_it_imports_nothing_fast() -> None:
    trees = [ast.parse(inspect.getsource(module)) for module in (plain, plain_parts)]
    imported = {
        node.module
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    own = {name for name in imported if name.startswith(("fedaux", "written_out"))}
    assert own == {
        "fedaux",
        "fedaux.privacy.classes",
        "fedaux.privacy.heads",
        "fedaux.privacy.mechanisms",
        "fedaux.config",
        "written_out.methods",
        "fedaux.core.objectives",
        "written_out.parts",
        "fedaux.models",
    }
