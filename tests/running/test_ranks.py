"""A run on several processes that torchrun starts equals the run of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers.experiments import TINY
from helpers.paths import ROOT
from safetensors.torch import load_file

import fedaux
from fedaux.core.algorithms import METHODS
from fedaux.core.ranks import PROCESS_ENDED
from fedaux.data.tensor_files import weights_digest
from fedaux.recipes import merged

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_pages")]

CHANGES: dict[str, Any] = {
    "method": [name for name in METHODS if name not in {f"{other}+p" for other in METHODS}],
    "rounds": 2,
    "participation_rate": 0.75,
    "local": {"optimizer": "sgd", "proximal": 0.1},
    "bayesian": {"samples": 2},
    "engine": {"clients_at_once": 1},
}
KEPT: dict[str, Any] = {
    "method": ["fedaux+m", "fedaux2"],
    "local": {"optimizer": "adam", "optimizer_state": "kept"},
    "prototypes": [
        {"name": "small", "model": "cnn", "options": {"width": 4}},
        {"name": "wide", "model": "cnn", "options": {"width": 8}},
    ],
}
DYING = """
import os, signal, sys
from fedaux.cli import main
from fedaux.core.simulation import SimulatedClients
dead, train = sys.argv.pop(1), SimulatedClients.train
def dying(self, clients, request):
    if request.round == 2 and os.environ["RANK"] == dead:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, clients, request)
SimulatedClients.train = dying
main()
"""


def recipe(folder: Path, *changes: Mapping[str, Any]) -> Path:
    settings = dict(TINY)
    for one in changes:
        settings = merged(settings, one)
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(settings))
    return file


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a program on several processes of one thread each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--standalone", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env=environment
    )


def result(out: Path) -> Mapping[str, object]:
    """Return metrics, ledger and every tensor of a run."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return {
        "metrics": rows,
        "ledger": json.loads((out / "ledger.json").read_text()),
        "tensors": {
            str(file.relative_to(out)): weights_digest(load_file(file))
            for file in sorted(out.rglob("*.safetensors"))
        },
    }


def same(out: Path, expected: Path) -> bool:
    return result(out) == result(expected)


@pytest.mark.long
def test_two_processes_equal_one_whatever_the_method(tmp_path: Path) -> None:
    file = recipe(tmp_path, CHANGES)
    fedaux.run(file, out=tmp_path / "alone")
    done = torchrun(2, "-m", "fedaux", "run", file, "--out", tmp_path / "together")
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "together", tmp_path / "alone")
    assert done.stdout.count("Report: ") == 1
    names = [{one.name for one in (tmp_path / run).iterdir()} for run in ("alone", "together")]
    assert names[1] == names[0] | {"report.html"}


@pytest.mark.long
def test_a_rank_that_dies_ends_the_run_which_other_ranks_go_on_with(tmp_path: Path) -> None:
    file, program = recipe(tmp_path, CHANGES, KEPT), tmp_path / "dying.py"
    program.write_text(DYING)
    fedaux.run(file, out=tmp_path / "alone")
    words: Sequence[object] = ("run", file, "--out", tmp_path / "together")
    for dead in (1, 0):
        done = torchrun(2, program, dead, *words, *(["--resume"] if dead == 0 else []))
        assert done.returncode != 0
        assert PROCESS_ENDED in done.stderr
        assert not (tmp_path / "together" / "report.html").exists()
    done = torchrun(3, "-m", "fedaux", *words, "--resume")
    assert done.returncode == 0, done.stderr
    assert same(tmp_path / "together", tmp_path / "alone")
