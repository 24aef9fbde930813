"""A sweep on several machines: its workers run on the nodes of a Ray cluster (docs/sweeps.md).

An actor on a node starts `python -m fedaux.sweep.worker`, as on a single machine, and forwards JSON
lines between it and the sweep. Logs and runs are in a folder that all machines share. Ray assigns
the GPUs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedaux.formatting import install_hint
from fedaux.sweep.processes import (
    STOP_TIMEOUT,
    LocalProcess,
    Process,
    SlotUnavailable,
    WorkerLost,
    shared_cores,
)

CHECK_TIMEOUT = 120.0
"""Seconds a node has for the check of its folder and its version of fedaux."""
START_TIMEOUT = 120.0
"""Seconds a node has to start a worker; it may be busy."""
POLL_SECONDS = 5.0
"""Seconds after which an actor answers without output of its worker."""
LOSS_TIMEOUT = 30.0
"""Seconds a cluster has to detect the loss of a node, after a worker was lost."""
CODE = """
import hashlib, json, pathlib, fedaux
root = pathlib.Path(fedaux.__file__).parent
digest = hashlib.sha256()
for file in sorted(root.rglob("*.py")):
    name = file.relative_to(root).as_posix().encode()
    digest.update(name + bytes(1) + file.read_bytes() + bytes(1))
print(json.dumps({"version": fedaux.__version__, "path": str(root), "digest": digest.hexdigest()}))
"""
"""Prints which fedaux a Python imports."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster: its id in Ray, a readable name, its resources."""

    id: str
    name: str
    processors: int
    gpus: int


@dataclass(frozen=True)
class Share:
    """Resources of a worker: a node, a share of a GPU or 0, and the number of workers on the
    node."""

    node: Node
    gpu: float
    at_once: int


def shares(nodes: Sequence[Node], *, jobs: int | None) -> list[Share]:
    """Return the resources of each worker: one worker per GPU, or one per node without GPUs.

    With more ``jobs``, workers share GPUs or the processors of nodes. Raises ValueError if there
    are too few processors.
    """
    gpus, processors = sum(node.gpus for node in nodes), sum(node.processors for node in nodes)
    if gpus:
        number = jobs or gpus
        places = _in_turn(nodes, lambda node: node.gpus) * math.ceil(number / gpus)
    elif not processors:
        raise ValueError("the cluster has neither GPUs nor processors for a worker")
    else:
        places = _in_turn(nodes, lambda node: node.processors)
        number = jobs or len({node.id for node in places})
        if number > len(places):
            raise ValueError(
                f"jobs = {number}: should be at most {len(places)}, the cluster's processors"
            )
    chosen = places[:number]
    part = 1 / math.ceil(number / gpus) if gpus else 0.0
    return [Share(node, part, sum(other.id == node.id for other in chosen)) for node in chosen]


def _in_turn(nodes: Sequence[Node], number: Callable[[Node], int]) -> list[Node]:
    most = max(map(number, nodes), default=0)
    return [node for turn in range(most) for node in nodes if turn < number(node)]


@contextmanager
def remote_slots(
    address: str, *, root: Path, jobs: int | None, most: int
) -> Iterator[list[RemoteSlot]]:
    """Connect to a cluster and yield at most ``most`` slots on nodes that share ``root``.

    Raises ValueError if there is no cluster, or its nodes lack the folder or have another fedaux.
    """
    ray = _ray()
    if own := not ray.is_initialized():
        _join(ray, address)
    try:
        nodes = [_node(row) for row in ray.nodes() if row["Alive"]]
        listed = shares(nodes, jobs=jobs)[:most]
        _check(
            ray,
            list({share.node.id: share.node for share in listed}.values()),
            root=root,
            address=address,
        )
        yield [RemoteSlot(ray, share, root) for share in listed]
    finally:
        if own:
            ray.shutdown()  # stops all actors of this program


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"a sweep on a cluster needs Ray: {install_hint('cluster')}") from error
    return ray


def _join(ray: Any, address: str) -> None:
    if not address.strip() or address == "local":  # Ray would start its own cluster
        raise ValueError(f"cluster = {address!r}: should be HOST:PORT, ray://HOST:PORT or auto")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"cluster = {address!r}: no Ray cluster found ({error})") from error


def _node(row: Mapping[str, Any]) -> Node:
    resources = row["Resources"]
    name = f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})"
    return Node(row["NodeID"], name, int(resources.get("CPU", 0)), int(resources.get("GPU", 0)))


def _on(node: Node) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def _check(ray: Any, nodes: Sequence[Node], *, root: Path, address: str) -> None:
    """Raise ValueError for every node that lacks the folder, cannot write it or has another
    fedaux."""

    def look(
        path: str, reply: str, program: str, seconds: float
    ) -> dict[str, Any]:  # sent to the node as is
        import subprocess
        import sys
        import time
        from pathlib import Path

        until = time.monotonic() + seconds
        while (
            not Path(path).exists() and time.monotonic() < until
        ):  # network file systems have delays
            time.sleep(0.2)
        seen, refused = Path(path).exists(), ""
        if seen:
            try:
                Path(reply).touch()
            except OSError as error:
                refused = str(error.strerror)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        return {
            "seen": seen,
            "refused": refused,
            "out": done.stdout,
            "error": done.stderr,
            "python": sys.executable,
        }

    own = json.loads(
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
        ).stdout
    )
    token = root / f".token-{secrets.token_hex(8)}"
    replies = {
        node.id: token.with_name(f"{token.name}-{number}") for number, node in enumerate(nodes)
    }
    problems = []
    token.touch()
    try:
        task = ray.remote(look)
        asked = {
            node.id: task.options(num_cpus=0, max_retries=0, scheduling_strategy=_on(node)).remote(
                str(token), str(replies[node.id]), CODE, STOP_TIMEOUT
            )
            for node in nodes
        }
        for node in nodes:
            try:
                answer = ray.get(asked[node.id], timeout=CHECK_TIMEOUT)
            except ray.exceptions.RayError as error:
                problems.append(f"node {node.name}: does not answer ({type(error).__name__})")
                continue
            problems += [
                f"node {node.name}: {line}"
                for line in _problems(answer, replies[node.id], root, own)
            ]
    finally:
        for file in (token, *replies.values()):
            file.unlink(missing_ok=True)
    if problems:
        raise ValueError("\n".join([f"cluster = {address!r}: cannot be used", *problems]))


def _problems(
    answer: Mapping[str, Any], reply: Path, root: Path, own: Mapping[str, str]
) -> Iterator[str]:
    if not answer["seen"]:
        yield f"does not see {root}; all machines must share this folder (--out)"
    elif answer["refused"]:
        yield f"cannot write to {root} ({answer['refused']})"
    elif not _appears(reply):
        yield f"has another {root}; all machines must share this folder (--out)"
    try:
        other = json.loads(answer["out"])
    except ValueError:
        last = (answer["error"].strip().splitlines() or ["no output"])[-1]
        yield f"{answer['python']} cannot import fedaux ({last}); install {own['version']}"
        return
    if other["version"] != own["version"]:
        yield f"has fedaux {other['version']} at {other['path']}; should be {own['version']}"
    elif other["digest"] != own["digest"]:
        yield f"fedaux at {other['path']} differs from {own['path']} on this machine"


def _appears(file: Path) -> bool:
    until = time.monotonic() + STOP_TIMEOUT
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


class WorkerActor:
    """A Ray actor that controls a worker process on its node."""

    def __init__(self, log: str, environment: Mapping[str, str | None], folder: str) -> None:
        chosen = {
            key: value
            for key, value in (dict(os.environ) | dict(environment)).items()
            if value is not None
        }
        here = Path(folder) if Path(folder).is_dir() else None
        self._process = LocalProcess(log=Path(log), environment=chosen, folder=here)
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._open = True
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.lines():
            self._said.put(line)
        self._said.put(None)

    def ready(self) -> None:
        """Return once the actor has started."""

    def send(self, line: str) -> None:
        """Send a line to the worker."""
        self._process.send(line)

    def receive(self) -> tuple[list[str], bool]:
        """Return new output of the worker, possibly none, and whether more may follow."""
        lines: list[str] = []
        with suppress(queue.Empty):
            while self._open:
                line = self._said.get(timeout=POLL_SECONDS if not lines else 0)
                self._open = line is not None
                lines += [] if line is None else [line]
        return lines, self._open

    def stop(self) -> int:
        """Stop the worker."""
        return self._process.stop()


class RemoteSlot:
    """A slot on a node of a Ray cluster."""

    def __init__(self, ray: Any, share: Share, root: Path) -> None:
        self.device = "cuda" if share.gpu else None
        self._ray = ray
        self._share = share
        self._root = root
        self._gone = False

    def start(self) -> Process:
        """Start a worker on the node. Raises SlotUnavailable if the node is gone or busy."""
        node, gpu = self._share.node, self._share.gpu
        # Ray sets threads by an actor's share of processors; use those of a local worker.
        given = {
            key: value for key, value in os.environ.items() if key.startswith(("FEDAUX_", "OMP_"))
        }
        cores: dict[str, str | None] = {"OMP_NUM_THREADS": None}
        environment = cores | shared_cores(node.processors, at_once=self._share.at_once) | given
        if given.get("FEDAUX_CACHE") == "":
            environment["FEDAUX_CACHE"] = str(self._root / ".shared")
        log = self._root / "logs" / f"workers-{node.id[:8]}.log"
        options = {
            "num_cpus": 0 if gpu else 1,
            "num_gpus": gpu,
            "max_restarts": 0,
            "max_concurrency": 4,
        }
        actor = (
            self._ray.remote(WorkerActor)
            .options(**options, scheduling_strategy=_on(node))
            .remote(str(log), environment, str(Path.cwd()))
        )
        try:
            self._ray.get(actor.ready.remote(), timeout=START_TIMEOUT)
        except self._ray.exceptions.RayError as error:
            self._gone = True
            self._ray.kill(actor)
            needed = "GPU" if gpu else "processor"
            raise SlotUnavailable(
                f"node {node.name}: a worker did not start, or no {needed} was free "
                f"({type(error).__name__})"
            ) from error
        return _RemoteProcess(self._ray, actor, node)

    def gone(self) -> bool:
        """Return whether the node is gone, after some time for the cluster to detect it."""
        until = time.monotonic() + LOSS_TIMEOUT
        while not self._gone and time.monotonic() < until:
            alive = {row["NodeID"] for row in self._ray.nodes() if row["Alive"]}
            self._gone = self._share.node.id not in alive
            time.sleep(0 if self._gone else 0.5)
        return self._gone


class _RemoteProcess:
    """A worker on a node, controlled by its actor."""

    def __init__(self, ray: Any, actor: Any, node: Node) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node

    def send(self, line: str) -> None:
        """Send a line."""
        self._ask(self._actor.send.remote(line))

    def lines(self) -> Iterator[str]:
        """Yield the output line by line."""
        more = True
        while more:
            lines, more = self._ask(self._actor.receive.remote())
            yield from lines

    def stop(self) -> int | None:
        """Stop the worker and its actor."""
        status: int | None = None
        with suppress(Exception):  # it may be gone
            status = self._ray.get(self._actor.stop.remote(), timeout=2 * STOP_TIMEOUT)
        with suppress(Exception):
            self._ray.kill(self._actor)
        return status

    def _ask(self, answer: Any) -> Any:
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayTaskError:  # also the error that the process raised
            raise
        except self._ray.exceptions.RayError as error:
            with suppress(Exception):  # a reachable actor must not continue a cell that moves
                self._ray.kill(self._actor)
            raise WorkerLost(
                f"node {self._node.name}: the worker is unreachable ({type(error).__name__})"
            ) from error
