"""The Flower engine in one process: parity with the simulator, faults, and what leaves a node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

import fedaux
from fedaux.config import Experiment

pytest.importorskip("flwr", reason="needs the extra flower")
from loopback import LoopbackGrid, write_nodes

from fedaux.engines.flower.server import federate

TELLS = ("accuracy", "loss", "local_loss", "clients_answered", "clients_dropped", "bytes_up", "bytes_down")


def federated(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "split": {"num_clients": 3, "alpha": 1.0},
        "federation": {"authenticated": False, "deadline": 5.0, "wait_seconds": 2.0},
        "engine": {"clients_at_once": 1},
    }
    from conftest import merged

    return tiny(**merged(base, changes))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": ["fedavg", "feddf+p"]},
        {"mode": "linear", "method": ["fedaux", "feddf+p"]},
        {"federation": {"wire": "fp16"}},
        {"local": {"optimizer_state": "kept"}, "method": ["fedavg"]},
        {"participation_rate": 0.67, "method": ["fedaux+m"]},
    ],
    ids=["fedaux", "fedavg", "linear", "fp16", "kept", "part"],
)
def test_a_federation_comes_to_the_simulators_figures(tmp_path: Path, changes: dict[str, Any]) -> None:
    experiment = federated(**changes)
    fedaux.run(experiment, out=tmp_path / "simulated")
    grid = LoopbackGrid(write_nodes(tmp_path / "nodes", experiment))
    federate(experiment, grid, path=tmp_path / "federated", resume=False)
    for simulated, real in zip(rows_of(tmp_path / "simulated"), rows_of(tmp_path / "federated"), strict=True):
        assert {key: real[key] for key in TELLS} == {key: simulated[key] for key in TELLS}
