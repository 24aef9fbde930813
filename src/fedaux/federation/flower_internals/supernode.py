"""Flower's SuperNode in this process, watched.

Flower's own command stays alive and useless after one failed TLS handshake, ends with status 0 if
the clock is wrong, and reports an unknown key and a key in use alike. Here the process ends with a
message and status 1, so that the service manager starts it again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from fedaux.federation import logs
from fedaux.federation.node import STARTED_VARIABLE, changed_since

LOGGER = logging.getLogger("fedaux.node")
FILE_VARIABLE = "FEDAUX_NODE_FILE"
"""Environment variable of a running node: its node.toml, watched for changes."""
AHEAD, BEHIND = 5.0, 305.0
"""Seconds by which a node's clock may be ahead of the server's, or behind it: Flower's limits."""
WARN_AHEAD, WARN_BEHIND = 2.0, 60.0
ANSWERS = 10
"""Answers over which a clock is judged; under load, single ones carry stale times."""
UNREGISTERED, IN_USE = "key not registered", "key in use"
"""What `fedaux federate link` adds to Flower's error if a node cannot join."""
VERSION_HEADER = "flwr-version-incompatibility-message"
REASONS = {
    UNREGISTERED: "the server does not know this node's key; on the server: fedaux federate "
    "register DIR KEY.pub --client N, with the public key and the number of this node",
    IN_USE: "this node's key is in use: another node is connected with it, or this one was "
    "connected less than a minute ago; start it again later, or end the other one",
}


class Watch:
    """Looks at every answer of the server."""

    def __init__(self, file: Path | None, digest: str) -> None:
        self._file, self._digest = file, digest
        self._seen: object = None
        self._skews: deque[float] = deque(maxlen=ANSWERS)
        self._warned = False
        self.last_error = ""

    def look(self, status: int, headers: Mapping[str, str], text: str, *, asked: datetime) -> None:
        """End this process if the answer to a request tells that the node cannot go on; warn of
        what is close to it."""
        if (skew := ahead_of(headers, now=asked)) is not None:
            self._skews.append(skew)
        least = min(self._skews, key=abs, default=None)
        if reason := refused(status, headers, text, skew=least):
            end(reason)
        if least is not None and len(self._skews) == ANSWERS:
            far = not -WARN_BEHIND < least < WARN_AHEAD
            if far and not self._warned:
                LOGGER.warning(
                    "this machine's clock is %s; beyond %g s ahead or %g s behind, the server "
                    "rejects this node: synchronise the clock",
                    *(_difference(least), AHEAD, BEHIND),
                )
            self._warned = far
        self._look_at_policy()

    def _look_at_policy(self) -> None:
        if self._file is None:
            return
        try:
            about = self._file.stat()
            state: object = (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError:
            state = None
        if state != self._seen and changed_since(self._file, self._digest):
            LOGGER.warning("%s changed; restart to apply", self._file)
        self._seen = state


def refused(
    status: int, headers: Mapping[str, str], text: str, *, skew: float | None
) -> str | None:
    """Return why the server no longer accepts this node; None if it does.

    `skew` is by how many seconds this machine's clock is ahead of the server's.
    """
    if message := headers.get(VERSION_HEADER):
        return f"this node and the server run different versions of Flower: {message}"
    if status == 401:
        if skew is not None and not -BEHIND < skew < AHEAD:
            return (
                f"this machine's clock is {_difference(skew)}; the server accepts up to "
                f"{AHEAD:g} s ahead and {BEHIND:g} s behind: synchronise the clock"
            )
        return (
            "the server rejects this node's signature: its key is not registered any more, or the "
            "server's database was replaced; register the key again"
        )
    try:
        extra = json.loads(text).get("extra") if status == 412 else None
    except (ValueError, AttributeError, RecursionError):
        extra = None
    return REASONS.get(extra) if isinstance(extra, str) else None


def ahead_of(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """Return by how many seconds this clock is ahead of the one that the answer states."""
    try:
        return (now - parsedate_to_datetime(headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return None


def _difference(skew: float) -> str:
    return f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the server's"


def end(reason: str) -> NoReturn:
    """Log why this node ends, and end it with status 1, from whatever thread this is called."""
    LOGGER.critical("%s. This node ends with status 1", reason.rstrip("."))
    logging.shutdown()
    os._exit(1)


def watched(interceptor: type[Any], watch: Watch) -> type[Any]:
    """Return Flower's interceptor of a node's requests, with a look at every answer."""
    import httpx
    from flwr.supercore.date import now  # the clock by which requests are signed

    class Watched(interceptor):  # type: ignore[misc]
        def intercept(self, context: Any, call_next: Any) -> Any:
            """Send a signed request."""
            asked = now()
            try:
                response = super().intercept(context, call_next)
            except httpx.TransportError as error:
                watch.last_error = str(error)
                raise
            text = response.text if response.is_error else ""
            watch.look(response.status_code, response.headers, text, asked=asked)
            return response

    return Watched


def _end_with_node() -> None:
    """End this process after the node's, whose number is an argument. If Flower's own signal was
    lost, it would look for the node for ever."""
    while str(os.getppid()) in sys.argv:
        time.sleep(5.0)
    os._exit(1)


def main() -> None:
    """Run a SuperNode until it is stopped; end with status 1 if it cannot go on by itself."""
    logs.configure()
    if sys.argv[1:2] == ["superexec"]:
        from flwr.supercore.cli import flower_superexec

        del sys.argv[1]
        logging.raiseExceptions = False  # an error of logging would swallow Flower's signal
        threading.Thread(target=_end_with_node, daemon=True).start()
        with suppress(KeyboardInterrupt):  # how Flower ends it when the node has ended
            flower_superexec()
        return
    connection: Any = import_module("flwr.supernode.fleet_http_connection")
    if not hasattr(connection, "NodeAuthHttpInterceptor"):
        raise RuntimeError("this version of Flower cannot be watched; fedaux needs flwr 1.41")
    file = os.environ.get(FILE_VARIABLE)
    watch = Watch(Path(file) if file else None, Path(os.environ.get(STARTED_VARIABLE, "")).stem)
    connection.NodeAuthHttpInterceptor = watched(connection.NodeAuthHttpInterceptor, watch)
    # A heartbeat that ends would leave a node that the server takes for lost.
    threading.excepthook = lambda failed: end(f"a part of the node failed: {failed.exc_value}")
    from flwr.supernode.cli import flower_supernode

    sys.argv[0] = "flower-supernode"
    try:
        flower_supernode()
    except Exception as error:
        end(str(error) or type(error).__name__)
    # Flower returns if it gives up, and its other threads would keep the process alive.
    detail = f" ({watch.last_error})" if watch.last_error else ""
    end(f"the connection to the server failed and Flower gave up{detail}")


if __name__ == "__main__":
    main()
