"""A node's warm process: it loads everything once, and forks for each message, which then costs no start.

Loading torch, Flower and the rest takes some seconds of a processor for every message otherwise. A fork has nothing of
earlier messages: it is as fresh as a new process. No random number is drawn and no thread started before it.
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

from fedaux.federation.asking import VARIABLE

LONGEST_REQUEST = 65536


def start(node: Path) -> dict[str, str]:
    """Start the warm process of a node; return what the environment of the node's other processes has to say of it.

    It ends when the process that called this ends, whatever program that has become.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="fedaux-")
    )  # readable by its owner alone, and short as sockets need it
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "node"))
    listener.listen(16)  # messages that come before everything is loaded wait
    listener.set_inheritable(True)
    parent = os.getpid()
    if os.fork() == 0:
        arguments = [str(node), str(listener.fileno()), str(parent), str(folder)]
        os.execv(sys.executable, [sys.executable, "-P", "-m", "fedaux.federation.warm", *arguments])
    listener.close()
    return {VARIABLE: str(folder / "node")}


def main() -> None:
    """Load, then fork for every message until the node ends."""
    node, descriptor, parent, folder = sys.argv[1:]
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    own = os.getpid()
    threads = load(Path(node))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
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
    """Import what a message needs, and return how many threads torch would use; here it has none yet.

    A pool of threads does not survive a fork, so nothing may start one before.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in ("flwr.supernode.cli", "fedaux.federation.client", "fedaux.federation.records"):
        import_module(module)
    from fedaux.federation.node import load_node
    from fedaux.federation.work import own_data

    torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # loads half of torch
    with suppress(Exception):  # whoever is asked for the data will say what is wrong with it
        own_data(load_node(node))
    return threads


def answer(connection: socket.socket, *, threads: int) -> NoReturn:
    """Answer one message as `flwr-clientapp` would, in this process, and end it."""
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
        from fedaux.federation import clientapp

        clientapp.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        # From here on nothing may turn this fork back: Flower's handlers raise exceptions.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(bytes([code & 255]))
        os._exit(code & 255)


def _end_with(connection: socket.socket) -> None:
    """End this process when the one that asked has been ended."""
    with suppress(OSError):
        connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
