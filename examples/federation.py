"""A federation: a server and two nodes as separate processes, over TLS and with authenticated
nodes.

    python examples/federation.py
    python examples/federation.py --quick

All of it is on this machine, with handwritten digits and noise that the server knows: a rehearsal.
docs/deployment.md leads through the same commands on several machines, with data and noise of the
nodes' own. Needs the extra `flower`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

RECIPE = """
name = "trial"
method = "fedaux"
rounds = {rounds}
participation_rate = 1.0
auxiliary = {{ size = {size} }}
split = {{ num_clients = 2, alpha = 0.1 }}
pretraining = {{ epochs = {epochs}, batch_size = 100 }}
certainty = {{ components = 8 }}
local = {{ learning_rate = 3e-3 }}
prototypes = [{{ name = "cnn", model = "cnn" }}]
"""
FEDAUX = [sys.executable, "-m", "fedaux", "federate"]
FLOWER = str(Path(sys.executable).with_name("flwr"))


def free_port() -> int:
    """Return a port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes], *, seconds: float = 60) -> None:
    """Wait until a process listens. Raises RuntimeError where it ends, or does not in time."""
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise RuntimeError("the server does not listen; its log says why")


def main(*, quick: bool, out: Path) -> None:
    """Set a federation up, start it, run it, and end it."""
    out = out.resolve()
    out.mkdir(parents=True)
    server, port = out / "trial", free_port()
    environment = os.environ | {"FLWR_HOME": str(server / "flower"), "FLWR_TELEMETRY_ENABLED": "0"}
    environment |= {"FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def say(*command: object) -> None:
        subprocess.run([str(word) for word in command], env=environment, check=True)

    def start(name: str, *command: object) -> subprocess.Popen[bytes]:
        with (out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(word) for word in command], env=environment, stdout=log, stderr=log
            )
        running.callback(process.wait, 30)
        running.callback(
            process.terminate
        )  # before the wait: callbacks are called from the last to the first
        return process

    # The server's folder, and its certificate.
    settings = RECIPE.format(
        rounds=1 if quick else 5, size=300 if quick else 1000, epochs=1 if quick else 5
    )
    (out / "recipe.toml").write_text(settings, encoding="utf-8")
    say(*FEDAUX, "init", server, "--recipe", out / "recipe.toml", "--trial", "--port", port)
    say(*FEDAUX, "certificates", server, "--host", "localhost")

    # Each node gets two files, makes its key, and looks at what it would be asked.
    nodes = [out / "node-0", out / "node-1"]
    for client, node in enumerate(nodes):
        node.mkdir()
        shutil.copy(server / "certificates/ca.crt", node)
        shutil.copy(server / f"nodes/node-{client}.toml", node / "node.toml")
        say(*FEDAUX, "key", node / "node.key")
        say(*FEDAUX, "check", node / "node.toml", "--recipe", server / "app/recipe.toml")

    with ExitStack() as running:
        wait_for(port, start("server", *FEDAUX, "link", server, "--host", "127.0.0.1"))
        for client, node in enumerate(nodes):
            say(*FEDAUX, "register", server, node / "node.key.pub", "--client", client)
            address = ("--superlink", f"localhost:{port}", "--port", free_port())
            start(node.name, *FEDAUX, "node", node / "node.toml", *address)
        say(FLOWER, "run", server / "app", server.name, "--stream")

    run = server / "runs/trial"
    say(*FEDAUX, "watch", run, "--once")  # its status is 1 if the run failed; that of flwr is 0
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        print(
            f"round {row['round']}: {row['accuracy']:.1%}, answers of clients "
            f"{row['clients_answered']}"
        )
    print(f"Everything about it: {run / 'report.html'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the same with less")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/federation"), help="a folder that is not there yet"
    )
    main(**vars(parser.parse_args()))
