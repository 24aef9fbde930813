"""Sweeps on a Ray cluster: who gets what, what nodes must have, and that a node may die (`make
test-cluster`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from helpers.experiments import TINY
from helpers.sweeps import accuracies, alive

from fedaux.paper import command, embedded
from fedaux.paper.running import Request
from fedaux.recipes import merged
from fedaux.running import run as execute
from fedaux.sweep import cluster, expand, sweep
from fedaux.sweep.cluster import Node, shares
from fedaux.sweep.runner import rounds_done

OWN = {"version": "1.0", "path": "/a/fedaux", "digest": "d"}


def nodes(*each: tuple[int, int]) -> list[Node]:
    return [
        Node(f"{number}", f"node{number}", processors, gpus)
        for number, (processors, gpus) in enumerate(each)
    ]


def given(each: list[cluster.Share]) -> list[tuple[str, float, int]]:
    return [(share.node.id, round(share.gpu, 3), share.at_once) for share in each]


def test_a_worker_a_gpu_and_more_jobs_share_them() -> None:
    machines = nodes((16, 2), (8, 0), (4, 1))
    assert given(shares(machines, jobs=None)) == [("0", 1, 2), ("2", 1, 1), ("0", 1, 2)]
    assert given(shares(machines, jobs=2)) == [("0", 1, 1), ("2", 1, 1)]
    assert given(shares(machines, jobs=5)) == [
        (*place, 0.5, n) for place, n in zip("02002", (3, 2, 3, 3, 2), strict=True)
    ]


def test_without_gpus_a_worker_a_node_or_as_many_as_asked_for() -> None:
    machines = nodes((4, 0), (0, 0), (2, 0))
    assert given(shares(machines, jobs=None)) == [("0", 0, 1), ("2", 0, 1)]
    assert given(shares(machines, jobs=3)) == [("0", 0, 2), ("2", 0, 1), ("0", 0, 2)]
    with pytest.raises(ValueError, match="jobs = 7: should be at most 6"):
        shares(machines, jobs=7)
    with pytest.raises(ValueError, match="neither GPUs nor processors"):
        shares(nodes((0, 0)), jobs=None)


def test_what_a_node_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STOP_TIMEOUT", 0.1)
    reply, root = tmp_path / "reply", Path("/shared/out")
    good = {
        "seen": True,
        "refused": "",
        "out": json.dumps(OWN),
        "error": "",
        "python": "/usr/bin/python",
    }

    def said(**changes: Any) -> list[str]:
        return list(cluster._problems(good | changes, reply, root, OWN))

    assert said() == ["has another /shared/out; all machines must share this folder (--out)"]
    reply.touch()
    assert said() == []
    assert said(seen=False)[0].startswith("does not see /shared/out; all machines must share")
    assert said(refused="Permission denied") == ["cannot write to /shared/out (Permission denied)"]
    assert said(out=json.dumps(OWN | {"version": "0.9"})) == [
        "has fedaux 0.9 at /a/fedaux; should be 1.0"
    ]
    assert said(out=json.dumps(OWN | {"digest": "e", "path": "/b"})) == [
        "fedaux at /b differs from /a/fedaux on this machine"
    ]
    assert said(out="", error="Traceback\nModuleNotFoundError: No module named 'fedaux'\n") == [
        "/usr/bin/python cannot import fedaux (ModuleNotFoundError: No module named 'fedaux'); "
        "install 1.0"
    ]


def test_addresses_and_devices_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    cells = expand(merged(TINY, {"split": {"alpha": [1.0, 2.0]}}))
    with pytest.raises(ValueError, match="devices = cpu: Ray assigns the devices"):
        sweep(cells, tmp_path / "out", devices=["cpu"], cluster="auto")
    with pytest.raises(ValueError, match="--cluster: split is not a grid of runs"):
        command.reproduce("split", Request(tmp_path, quick=True, sweeping={"cluster": "auto"}))
    pytest.importorskip("ray")
    with pytest.raises(
        ValueError, match="cluster = 'local': should be HOST:PORT, ray://HOST:PORT or auto"
    ):
        sweep(cells, tmp_path / "out", cluster="local")


# A real cluster of raylets on this machine

NODE = {"object_store_memory": 80 * 2**20}
TROUBLE = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


class Machines:
    """A head without processors, to which programs connect, and nodes with one each that can be
    killed."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False} | NODE
        )
        self._nodes: list[Any] = []
        self._programs: list[subprocess.Popen[str]] = []
        self.address = str(self._cluster.address)

    def add(self, **options: Any) -> None:
        self._nodes.append(self._cluster.add_node(**{"num_cpus": 1, **NODE, **options}))

    def kill(self) -> None:
        """Kill the node that was added last, as a power failure would."""
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def fedaux(self, *words: str, folder: Path) -> subprocess.Popen[str]:
        whole = [sys.executable, "-m", "fedaux", *words, "--cluster", self.address]
        program = subprocess.Popen(
            whole, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._programs.append(program)
        return program

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.communicate()
        self._cluster.shutdown()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    pytest.importorskip("ray")
    for key, value in TROUBLE.items():
        monkeypatch.setenv(key, value)
    found = Machines()
    yield found
    found.close()


def recipe(folder: Path, *, rounds: int, alphas: list[float]) -> str:
    file = folder / "recipe.toml"
    file.write_text(tomli_w.dumps(merged(TINY, {"rounds": rounds, "split": {"alpha": alphas}})))
    return str(file)


def until(what: str, found: Any, *, seconds: float = 180.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.1)


def workers_in(folder: Path) -> list[int]:
    """Processes of workers whose errors go into a sweep's folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            errors, command = str((process / "fd/2").readlink()), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if b"fedaux.sweep.worker" in command and errors.startswith(str(folder.resolve())):
            found.append(int(process.name))
    return found


@pytest.mark.cluster
def test_a_node_that_dies_loses_nothing_but_time(machines: Machines, tmp_path: Path) -> None:
    machines.add()
    machines.add()
    out, alphas = tmp_path / "out", [0.5, 5.0, 50.0]
    process = machines.fedaux(
        "run", recipe(tmp_path, rounds=25, alphas=alphas), "--out", "out", folder=tmp_path
    )
    until(
        "both nodes' third round",
        lambda: all(rounds_done(out / f"alpha={alpha:g}") >= 3 for alpha in alphas[:2]),
    )
    machines.kill()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "waits for another worker: node" in said
    assert len(list((out / "logs").glob("workers-*.log"))) == 2, "each node had a worker"
    for cell in expand(merged(TINY, {"rounds": 25, "split": {"alpha": alphas}})):
        execute.run(cell.experiment, out=tmp_path / cell.name)
        assert accuracies(out / cell.name) == accuracies(tmp_path / cell.name)
    assert not list(out.glob(".token*"))

    # The last machine dies as well: what is left is recorded as failed, and another machine goes on
    # with it.
    words = [
        "run",
        recipe(tmp_path, rounds=25, alphas=[0.5, 7.0, 70.0]),
        "--out",
        "out",
        "--resume",
    ]
    process = machines.fedaux(*words, folder=tmp_path)
    until("a round", lambda: rounds_done(out / "alpha=7") >= 3)
    machines.kill()
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 3, said
    assert "no machine is left to run it" in said
    machines.add()
    process = machines.fedaux(*words, folder=tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "1 finished before, 1 to be continued" in said


@pytest.mark.cluster
def test_ctrl_c_leaves_no_worker_behind_and_what_fails_says_why(
    machines: Machines, tmp_path: Path
) -> None:
    import ray

    machines.add()
    out = tmp_path / "out"
    words = ["run", recipe(tmp_path, rounds=500, alphas=[0.5, 5.0]), "--out", "out"]
    process = machines.fedaux(*words, folder=tmp_path)
    until("a round", lambda: rounds_done(out / "alpha=0.5") >= 2)
    workers = workers_in(out)
    assert len(workers) == 1
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    until("the worker's end", lambda: not any(map(alive, workers)), seconds=15)
    ray.init(address=machines.address, log_to_driver=False)
    try:
        until("free processor", lambda: ray.available_resources().get("CPU") == 1.0, seconds=30)
        # In Python, on a connection of one's own, which stays; data that a node does not have are
        # the cell's mistake.
        there = embedded.settings("photographs", "auxiliary", tmp_path / "data")["auxiliary.path"]
        cells = expand(
            merged(TINY, {"rounds": 1, "auxiliary": {"source": "tensors", "path": there}})
        )
        Path(there).unlink()
        outcome = sweep(cells, tmp_path / "missing", cluster="auto")
        (reason,) = outcome.failed.values()
        assert f"{there}'" in reason
        assert "there is no such file" in reason
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.cluster
def test_each_worker_sees_one_gpu_and_its_share_of_the_cores(
    machines: Machines, tmp_path: Path
) -> None:
    import ray

    machines.add(num_gpus=2)  # which nobody has to own, as long as nobody computes on them
    ray.init(address=machines.address, log_to_driver=False)
    try:
        with cluster.remote_slots("auto", root=tmp_path, jobs=None, most=9) as seats:
            assert [seat.device for seat in seats] == ["cuda", "cuda"]
            processes = [seat.start() for seat in seats]
            found = []
            for worker in workers_in(tmp_path):
                lines = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
                found.append(dict(line.decode().split("=", 1) for line in lines if line))
            assert {environment["CUDA_VISIBLE_DEVICES"] for environment in found} == {"0", "1"}
            assert {environment["OMP_NUM_THREADS"] for environment in found} == {"1"}
            assert [process.stop() for process in processes] == [0, 0]
    finally:
        ray.shutdown()


@pytest.mark.cluster
def test_nodes_without_the_folder_or_with_another_fedaux_are_named(
    machines: Machines, tmp_path: Path
) -> None:
    old = tmp_path / "old/fedaux"
    old.mkdir(parents=True)
    (old / "__init__.py").write_text('__version__ = "0.0.1"\n')
    machines.add(env_vars={"PYTHONPATH": str(old.parent)})
    words = ["run", recipe(tmp_path, rounds=1, alphas=[0.5, 5.0]), "--out", "out"]
    process = machines.fedaux(*words, folder=tmp_path)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 2, said
    assert f"has fedaux 0.0.1 at {old}; should be" in said
    assert not (tmp_path / "out/sweep.json").exists()
    machines.kill()

    apart = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if subprocess.run(
        [*apart, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("this machine gives nobody a view of its own of the disk")
    ray = shutil.which("ray", path=str(Path(sys.executable).parent))
    inside = (
        f"mount -t tmpfs none {tmp_path} && exec {ray} start --block --num-cpus 1 --address "
        f"{machines.address}"
    )
    blind = subprocess.Popen(
        [*apart, "sh", "-c", f"{inside} --object-store-memory {NODE['object_store_memory']}"]
    )
    try:
        for _ in range(30):
            process = machines.fedaux(*words, "--resume", folder=tmp_path)
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 2, said
            if "neither GPUs nor processors" not in said and "does not answer" not in said:
                break
            time.sleep(1)  # until one node is known to be gone, and the other to be there
        assert f"does not see {tmp_path / 'out'}; all machines must share this folder" in said
    finally:
        blind.terminate()
        blind.wait()
