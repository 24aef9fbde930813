"""A node's warm process: imports everything once and forks for each message, to save the start-up
time.

Importing torch, Flower and the rest takes seconds of CPU time. A fork shares no state with earlier
messages, like a new process. No random number is drawn and no thread started before the fork.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from fedaux.federation.flower_internals.relay import VARIABLE

LONGEST_REQUEST = 65536


def start(node: Path) -> dict[str, str]:
    """Start the warm process of a node; return the environment variables for the node's other
    processes.

    It ends when the calling process ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedaux-"))  # private, and short enough for a socket
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "node"))
    listener.listen(16)  # early messages wait until everything is loaded
    listener.set_inheritable(True)
    parent = os.getpid()
    if os.fork() == 0:
        arguments = [str(node), str(listener.fileno()), str(parent), str(folder)]
        os.execv(
            sys.executable,
            [sys.executable, "-P", "-m", "fedaux.federation.flower_internals.warm", *arguments],
        )
    listener.close()
    return {VARIABLE: str(folder / "node")}


def main() -> None:
    """Load everything, then fork for every message until the node ends."""
    node, descriptor, parent, folder = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    own = os.getpid()
    threads = load(Path(node))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener.settimeout(1.0)
    try:
        while os.getppid() == int(parent):
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                answer(connection, threads=threads)
            connection.close()
    finally:
        if os.getpid() == own:
            (Path(folder) / "node").unlink(missing_ok=True)
            Path(folder).rmdir()


def load(node: Path) -> int:
    """Import what a message needs, and return torch's default number of threads.

    A thread pool does not survive a fork, so none may be started before it.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in ("flwr.supernode.cli", "fedaux.federation.client", "fedaux.federation.records"):
        import_module(module)
    from fedaux.federation.node import load_started
    from fedaux.federation.work import own_data

    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports much of torch
    with suppress(Exception):  # errors are reported when a request needs the data
        own_data(load_started(node))
    return threads


def answer(connection: socket.socket, *, threads: int) -> NoReturn:
    """Answer one message as `flwr-clientapp` would, and end this process."""
    import torch

    code = 1
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(threads)
        request, descriptors, _, _ = socket.recv_fds(connection, LONGEST_REQUEST, 2)
        for descriptor, own in zip(descriptors, (1, 2), strict=True):
            os.dup2(descriptor, own)
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        sys.argv = ["flwr-clientapp", *json.loads(request)]
        from fedaux.federation.flower_internals import clientapp

        clientapp.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        # Flower's signal handlers raise exceptions, which must not interrupt the exit.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(bytes([code & 255]))
        os._exit(code & 255)


def _end_with(connection: socket.socket) -> None:
    """End this process when the requesting process ends."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
