"""Flower's long-running processes, restricted to this federation.

By default, Flower lets everyone who reaches the server's port start runs and register nodes, and
nodes execute the server's code. Here only the server's own machine may do the former, and nodes
execute only their own installation.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from fedaux.federation import logs
from fedaux.federation.certificates import server_problems
from fedaux.federation.flower_internals import relay, supernode, warm
from fedaux.federation.keys import require_private
from fedaux.federation.node import NodeConfig, keep_policy
from fedaux.formatting import install_hint

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Turns off telemetry and installation of software, unless the user has set these variables."""
PROMPT = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1"}
"""Shortens the idle time between message and task at a node, unless the user has set it."""

FORGET_SECONDS = 5.0
"""Time between two cuts of the log of the server's database."""
TASK = "flwr-clientapp"
"""Flower's command that answers a message; a node replaces it."""
EXECUTOR = "flower-superexec"
"""Flower's command that starts the one above; a node replaces it for its log alone."""
REFUSED_TASKS = (
    "flwr-serverapp",
    "flwr-agentapp",
    "flwr-model",
    "flwr-connector",
    "flwr-simulation",
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def require_flower() -> None:
    """Raise ValueError if Flower is not installed."""
    if find_spec("flwr") is None:
        raise ValueError(f"a federation needs Flower: {install_hint('flower,privacy')}")


def require_secure_noise() -> None:
    """Raise ValueError if secure noise cannot be drawn."""
    if find_spec("opendp") is None:
        raise ValueError(f"privacy.noise = secure: needs OpenDP, {install_hint('privacy')}")


def environment(home: Path, *, first: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment of a Flower process, with its own home and the commands beside
    Python."""
    folders = [
        *map(str, first),
        str(Path(sys.executable).parent),
        os.environ.get("PATH", os.defpath),
    ]
    own = {"FLWR_HOME": str(home), "PATH": os.pathsep.join(folders)}
    return QUIET | dict(os.environ) | own


class RemoteNodesOnly:
    """Lets other machines use only the nodes' interface; only this machine starts runs and
    registers nodes.

    Flower serves all interfaces on one port and authenticates only nodes. A connection is from this
    machine if it comes from a loopback address, or from the address it was made to.
    """

    OPEN = ("/v1/fleet/", "/health")

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward allowed requests; answer 403 to others."""
        if scope["type"] == "lifespan" or from_this_machine(scope) or self._is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            start = {
                "type": "http.response.start",
                "status": 403,
                "headers": [(b"content-type", b"text/plain")],
            }
            await send(start)
            await send(
                {
                    "type": "http.response.body",
                    "body": b"only allowed on the server's own machine\n",
                }
            )
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_open(self, scope: Scope) -> bool:
        path = str(scope["path"])
        return scope["type"] == "http" and (path == self.OPEN[1] or path.startswith(self.OPEN[0]))


def from_this_machine(scope: Mapping[str, Any]) -> bool:
    """Return whether a connection was made on this machine; False if in doubt."""
    client, server = scope.get("client"), scope.get("server")
    if not client or not server:
        return False
    try:
        peer, own = (ipaddress.ip_address(pair[0].partition("%")[0]) for pair in (client, server))
    except ValueError:
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return bool(peer.is_loopback or (mapped is not None and mapped.is_loopback) or peer == own)


def serve_link(arguments: Sequence[str]) -> None:
    """Run Flower's SuperLink in this process; other machines can connect only as nodes.

    Raises RuntimeError if this version of Flower does not support the restriction.
    """
    from starlette.middleware import Middleware

    extensions: Any
    main: Any
    extensions, main = (import_module(f"flwr.superlink.{name}") for name in ("extensions", "main"))
    extensions.get_middleware = lambda: (Middleware(RemoteNodesOnly),)
    outermost = next((layer.cls for layer in main._get_middleware()), None)
    if outermost is not RemoteNodesOnly:
        raise RuntimeError("this version of Flower cannot be restricted; fedaux needs flwr 1.41")
    tell_why(import_module("flwr.superlink.servicer.fleet.fleet_handlers"))
    from flwr.superlink.cli import flower_superlink

    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def tell_why(handlers: Any) -> None:
    """Let Flower tell a node that cannot join whether its key is unknown or in use."""
    from flwr.supercore.error import ApiErrorCode, FlowerError

    activate = handlers.activate_node

    def explained(request: Any, state: Any) -> Any:
        try:
            return activate(request=request, state=state)
        except FlowerError as error:
            if error.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                known = state.get_node_id_by_public_key(request.public_key) is not None
                error.public_details = supernode.IN_USE if known else supernode.UNREGISTERED
            raise

    handlers.activate_node = explained


def database_of(folder: Path) -> Path:
    """Return the file in which a folder's SuperLink keeps messages until they are fetched."""
    return folder / "flower" / "link.db"


def forget_deleted(database: Path, *, every: float = FORGET_SECONDS) -> Callable[[], None]:
    """Make Flower's database overwrite what it deletes; return a function that cuts the log of its
    changes to nothing, which a thread calls every few seconds.

    Flower deletes messages once they were fetched; SQLite leaves their bytes in free pages and in
    the write-ahead log. Raises RuntimeError if this version of Flower does not support it.
    """
    mixin: Any = import_module("flwr.supercore.sql_mixin")
    pragmas = getattr(mixin, "SQLITE_PRAGMAS", None)
    if not isinstance(pragmas, tuple):
        raise RuntimeError("this version of Flower cannot be told to forget; needs flwr 1.41")
    mixin.SQLITE_PRAGMAS = (*pragmas, ("secure_delete", "ON"))
    log = database.with_name(database.name + "-wal")

    def cut() -> None:
        if log.exists() and log.stat().st_size:
            with contextlib.closing(sqlite3.connect(database, timeout=1.0)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def keep_cutting() -> None:
        while True:
            time.sleep(every)
            with contextlib.suppress(sqlite3.Error, OSError):  # busy: the next time
                cut()

    threading.Thread(target=keep_cutting, daemon=True).start()
    return cut


def register_key(folder: Path, public_key: Path) -> None:
    """Register a public key at the running SuperLink of a folder, unless it is. Raises
    ValueError."""
    command = shutil.which("flwr", path=environment(Path())["PATH"])
    assert command is not None, "flwr is installed, its commands are not"
    done = subprocess.run(
        [command, "supernode", "register", str(public_key), folder.name],
        env=environment(folder / "flower"),
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    if done.returncode and "already in use" not in said:
        raise ValueError(f"{public_key}: not registered; is the server running? {said.strip()}")


def link_arguments(folder: Path, *, host: str, port: int, simulation: bool) -> list[str]:
    """Return the arguments of a folder's SuperLink. Raises ValueError for missing certificates, and
    for certificates that nodes or the server's own processes would reject."""
    place = ["--host", host, "--port", str(port), "--disable-runtime-dependency-installation"]
    if simulation:
        return [*place, "--insecure", "--simulation"]
    certificates = folder / "certificates"
    names = {
        "--ssl-ca-certfile": "ca.crt",
        "--ssl-certfile": "server.pem",
        "--ssl-keyfile": "server.key",
    }
    for name in names.values():
        if not (certificates / name).is_file():
            raise ValueError(
                f"{certificates / name}: there is no such file; fedaux federate certificates "
                f"{folder} --host NAME"
            )
    for name in ("server.key", "ca.key"):
        if (certificates / name).is_file():
            require_private(certificates / name)
    if problems := server_problems(certificates, names=[own_address(host), *own_names(folder)]):
        raise ValueError("\n".join(problems))
    paths = [part for option, name in names.items() for part in (option, str(certificates / name))]
    return [
        *place,
        *paths,
        "--enable-supernode-auth",
        "--database",
        str(database_of(folder)),
    ]


def port_of(folder: Path, *, simulation: bool) -> int:
    """Return the port of the server of a folder. Raises ValueError for other folders."""
    return _address_of(folder, simulation=simulation)[1]


def own_names(folder: Path) -> list[str]:
    """Return the name by which `flwr` reaches the server of a folder."""
    return [_address_of(folder, simulation=False)[0]]


def _address_of(folder: Path, *, simulation: bool) -> tuple[str, int]:
    file = folder / "flower" / "config.toml"
    try:
        connections = tomllib.loads(file.read_text(encoding="utf-8"))["superlink"]
        address: str = connections["simulation" if simulation else connections["default"]][
            "address"
        ]
        host, _, port = address.rpartition(":")
        return host.strip("[]"), int(port)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file}: has no address ({error}); `fedaux federate init` creates a federation's "
            "folder"
        ) from error


def own_address(host: str) -> str:
    """Return the name by which the server's own processes reach a SuperLink on this address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def node_command(
    file: Path, *, superlink: str, certificate: Path, key: Path, port: int
) -> list[str]:
    """Return the command of a SuperNode for a node file. Raises ValueError for missing files."""
    for option, path in (("--root-certificates", certificate), ("--key", key)):
        if not path.is_file():
            raise ValueError(f"{option} {path}: there is no such file")
    require_private(key)
    host, colon, number = superlink.rpartition(":")
    if not (colon and host and number.isdigit()):
        raise ValueError(f"--superlink {superlink}: should be HOST:PORT")
    return [
        *(sys.executable, "-P", "-m", supernode.__name__),
        *("--superlink", superlink),
        *("--root-certificates", str(certificate)),
        *("--auth-supernode-private-key", str(key)),
        *("--port", str(port)),
        *("--node-config", f'fedaux="{file.resolve()}"'),
    ]


def become_node(
    command: Sequence[str], *, file: Path, config: NodeConfig, json_logs: bool = False
) -> NoReturn:
    """Replace this process by a SuperNode that uses this installation of fedaux, never code that
    was sent."""
    file, state = file.resolve(), Path(config.state)
    os.environ.update(keep_policy(file, config) | {supernode.FILE_VARIABLE: str(file)})
    if json_logs:
        os.environ[logs.VARIABLE] = "json"
    commands = write_commands(state / "commands")
    own = PROMPT | environment(state / "flower", first=[commands]) | warm.start(file)
    # Not a child process: stopping this process stops the node.
    os.execve(command[0], list(command), own)


def write_commands(folder: Path) -> Path:
    """Write the commands that replace Flower's at a node; return their folder, for the front of
    PATH."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    scripts = {TASK: f'#!/bin/sh\nexec "{sys.executable}" -I -S "{relay.__file__}" "$@"\n'}
    scripts[EXECUTOR] = (
        f'#!/bin/sh\nexec "{sys.executable}" -P -m {supernode.__name__} superexec "$@"\n'
    )
    refusal = "refused: a fedaux node only executes its own installation"
    scripts |= {
        name: f'#!/bin/sh\necho "{name}: {refusal}" >&2\nexit 1\n' for name in REFUSED_TASKS
    }
    for name, text in scripts.items():
        temporary = folder / f".{name}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o700)
        temporary.replace(folder / name)
    return folder
