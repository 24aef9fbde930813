"""A federation of real processes on loopback: SuperLink, SuperNodes and `flwr run`, with TLS and
node keys."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedaux.federation.flower_internals.processes import environment
from fedaux.federation.folder import write_folder
from fedaux.federation.keys import write_certificates, write_node_key
from fedaux.recipes import merged

BIN = Path(sys.executable).parent


class Federation:
    """One folder with everything in it. Processes are ended by their ids when it is closed."""

    def __init__(
        self, folder: Path, recipe: Mapping[str, Any], *, nodes: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.port = free_port()
        recipe_file = folder.parent / "recipe.toml"
        folder.parent.mkdir(parents=True, exist_ok=True)
        recipe_file.write_text(tomli_w.dumps(dict(recipe)), encoding="utf-8")
        write_folder(folder, recipe=str(recipe_file), clients=None, trial=True, port=self.port)
        write_certificates(folder / "certificates", hosts=["127.0.0.1"], days=2)
        self.clients = recipe["split"]["num_clients"]
        for client in range(self.clients):
            self.change_node(client, {"device": "cpu", "threads": 1, **(nodes or {})})
            write_node_key(folder / f"node-{client}.key")
        self.out = folder / "runs" / recipe["name"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[int, int] = {}
        self.run_id = ""

    def change_node(self, client: int, changes: Mapping[str, Any]) -> None:
        """Change a node's configuration."""
        file = self.folder / "nodes" / f"node-{client}.toml"
        file.write_text(
            tomli_w.dumps(merged(tomllib.loads(file.read_text()), changes)), encoding="utf-8"
        )

    def start_link(self) -> None:
        """Start the server's SuperLink and wait until it listens."""
        self._start(
            "link",
            [
                sys.executable,
                "-m",
                "fedaux",
                "federate",
                "link",
                str(self.folder),
                "--host",
                "127.0.0.1",
            ],
        )
        wait_for(lambda: listens(self.port), 60, "the SuperLink listens")

    def register(self, client: int) -> None:
        """Tell the server a node's public key, as that of a client."""
        key = str(self.folder / f"node-{client}.key.pub")
        command = [sys.executable, "-m", "fedaux", "federate", "register", str(self.folder), key]
        done = subprocess.run(
            [*command, "--client", str(client)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start_node(
        self,
        client: int,
        *,
        key: Path | None = None,
        superlink: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start a SuperNode that speaks for a client."""
        self.ports.setdefault(client, free_port())
        command = [
            *(sys.executable, "-m", "fedaux", "federate", "node"),
            str(self.folder / "nodes" / f"node-{client}.toml"),
            *("--superlink", superlink or f"127.0.0.1:{self.port}"),
            *("--root-certificates", str(self.folder / "certificates" / "ca.crt")),
            *("--key", str(key or self.folder / f"node-{client}.key")),
            *("--port", str(self.ports[client])),
        ]
        self._start(f"node-{client}", command, env=env)

    def restart_node(self, client: int, seconds: float = 300.0) -> None:
        """Start a node that was killed. Flower takes the dead one for alive for a minute, and ends
        the new one."""
        log = self.folder / f"node-{client}.log"
        before = log.read_text(errors="replace").count("SuperNode ID")

        def let_in() -> bool:
            if log.read_text(errors="replace").count("SuperNode ID") > before:
                return True
            if self.processes[f"node-{client}"].poll() is not None:
                time.sleep(5)
                self.start_node(client)
            return False

        self.start_node(client)
        wait_for(let_in, seconds, f"node {client} is let in again", self.logs)

    def start(self, *, but: tuple[int, ...] = ()) -> None:
        """Start everything: link, keys, nodes."""
        self.start_link()
        for client in range(self.clients):
            self.register(client)
            if client not in but:
                self.start_node(client)

    def run(self, *, resume: bool = False, changes: str = "") -> None:
        """Start a run; it goes on by itself."""
        config = f'resume={"true" if resume else "false"} set="{changes}"'
        said = self.flwr("run", str(self.folder / "app"), self.folder.name, "--run-config", config)
        self.run_id = max(re.findall(r"\d{10,}", said), key=len)

    def run_log(self) -> str:
        """Return what the server's app has said."""
        return self.flwr("log", self.run_id, self.folder.name, "--show")

    def flwr(self, *arguments: str) -> str:
        """Call Flower's command and return what it says."""
        done = subprocess.run(
            [str(BIN / "flwr"), *arguments],
            env=environment(self.folder / "flower"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the rounds that are finished."""
        file = self.out / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_rounds(self, count: int, seconds: float) -> list[dict[str, Any]]:
        """Wait until so many rounds are finished."""
        wait_for(
            lambda: len(self.rows()) >= count or self.failure(),
            seconds,
            f"{count} rounds",
            self.logs,
        )
        assert not self.failure(), self.logs()
        return self.rows()

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the run has written its summary."""
        wait_for(lambda: self.state() in {"finished", "failed"}, seconds, "the end", self.logs)
        assert self.state() == "finished", self.logs()

    def state(self) -> str:
        """Return the state of the run, as everybody can see it."""
        file = self.out / "nodes.json"
        return str(json.loads(file.read_text())["run"]["state"]) if file.exists() else "unknown"

    def failure(self) -> bool:
        """Whether the run has stopped before its end."""
        return self.state() == "failed"

    def ledger(self, client: int) -> list[dict[str, Any]]:
        """Return what a node has spent, from its own disk."""
        files = list((self.folder / "nodes").glob(f"**/client-{client:05d}/ledger.json"))
        return list(json.loads(files[0].read_text())["spent"]) if files else []

    def kill(self, name: str) -> None:
        """End a process and all that it started, each by its id, with SIGKILL."""
        process = self.processes.pop(name)
        for number in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait(30)

    def logs(self) -> str:
        """Return the ends of all logs."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"== {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files
        )

    def close(self) -> None:
        """End everything that is left."""
        for name in list(self.processes):
            self.kill(name)

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(
        self, name: str, command: list[str], *, env: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "FEDAUX_CACHE": "", **(env or {})},
            )


def descendants(number: int) -> list[int]:
    """Return the processes that a process has started, and theirs; Flower gives some of them
    sessions of their own."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [number]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(
    condition: Callable[[], object],
    seconds: float,
    what: str,
    about: Callable[[], str] = lambda: "",
) -> None:
    """Wait until something holds; fail where it does not in time."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what}: not within {seconds} s\n{about()}"
        time.sleep(0.2)
