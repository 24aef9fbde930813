"""The nodes of a federation: which node is which client, and which are present."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedaux.config import Federation
from fedaux.federation import records
from fedaux.federation.answers import Misstated, read_hello
from fedaux.federation.records import Unusable
from fedaux.federation.registry import fingerprint, key_of, registered, same_key
from fedaux.federation.status import StatusCallback
from fedaux.federation.terms import HELLO
from fedaux.files import read_json, save_json
from fedaux.privacy.bounds import MOST_EXAMPLES

FILE = "federation.json"
"""In the run directory: the run's name at the nodes, and the node of each client."""
LOGGER = logging.getLogger("fedaux.server")
HELLO_SECONDS = 3600.0
"""How long a node may take to answer a greeting."""
WAIT_SECONDS = 0.5


class Members:
    """The nodes of a run.

    A node that is new, or that missed a deadline, is greeted, and counts as present once it has
    answered which client it is. The server waits for this only at the start and if no client is
    present. Client numbers belong to keys: as the federation's `registry` says, or
    `federation.nodes`; without either, the first node of the run that claims a client keeps it. All
    others that claim it are turned away.
    """

    def __init__(
        self,
        grid: Grid,
        directory: Path,
        *,
        section: Federation,
        num_clients: int,
        status: StatusCallback,
        registry: Path | None = None,
    ) -> None:
        self.grid = grid
        self.status = status
        self._registry = registry
        self._section = section
        self._num_clients = num_clients
        self._file = directory / FILE
        stored: dict[str, Any] = read_json(self._file) if self._file.exists() else {}
        self.token: str = stored.get("run") or secrets.token_hex(16)
        self._owner: dict[int, str] = {
            int(client): node for client, node in stored.get("nodes", {}).items()
        }
        self._client_of: dict[int, int] = {}
        """The present nodes."""
        self._stated: dict[int, int | None] = {}
        """The numbers of examples that clients stated when they connected."""
        self._greeted: dict[str, int] = {}
        """Nodes by the greeting they have not answered yet."""
        self._rejected: dict[int, str] = {}
        self._connected: Mapping[int, str] = {}
        self._begun = False
        self._save()

    def present(self) -> Sequence[int]:
        """Return the present clients, sorted. Raises ValueError if there are none for too long."""
        wanted = (
            1
            if self._begun
            else min(self._section.wait_for or self._num_clients, self._num_clients)
        )
        ends = time.monotonic() + self._section.wait_seconds
        while True:
            self._look()
            clients = sorted(self._client_of.values())
            if len(clients) >= wanted or time.monotonic() >= ends:
                break
            time.sleep(WAIT_SECONDS)
        if not clients:
            rejected = "".join(
                f"; node {node}: {reason}" for node, reason in self._rejected.items()
            )
            raise ValueError(
                f"no client is present after {self._section.wait_seconds:g} s "
                f"(federation.wait_seconds){rejected}. Finished rounds are saved; continue with "
                "resume=true"
            )
        if missing := sorted(set(range(self._num_clients)) - set(clients)):
            LOGGER.warning("absent: clients %s", ", ".join(map(str, missing)))
        self._begun = True
        return clients

    def node(self, client: int) -> int | None:
        """Return the node of a client, if it is present."""
        return next((node for node, own in self._client_of.items() if own == client), None)

    def most_examples(self, client: int) -> int:
        """Return the examples that a client stated when it connected. Raises Misstated."""
        if (stated := self._stated.get(client)) is None:
            raise Misstated("did not state its number of examples when it connected; see its log")
        return stated

    def plausible_examples(self, client: int) -> int:
        """Return the most examples with which a client may count in an average.

        That is a share s of all examples, s / (1 - s) of the examples that the others state;
        without two others there is nothing to compare with.
        """
        others = [stated for one, stated in self._stated.items() if stated and one != client]
        share = self._section.largest_share
        if len(others) < 2 or share >= 1:
            return MOST_EXAMPLES
        return max(1, int(sum(others) * share / (1 - share)))

    def doubt(self, client: int) -> None:
        """Treat a client as absent until its node answers a greeting."""
        if (node := self.node(client)) is not None:
            del self._client_of[node]

    def _look(self) -> None:
        """Update the connected nodes, read answers to greetings, and greet new nodes."""
        self._connected = {info.node_id: key_of(info.public_key) for info in self.grid.get_nodes()}
        for node in [node for node in self._client_of if node not in self._connected]:
            self.status.gone([self._client_of.pop(node)])
        self._rejected = {
            node: why for node, why in self._rejected.items() if node in self._connected
        }
        if self._greeted:
            for number, reply in pulled(self.grid, self._greeted).items():
                node = self._greeted.pop(number)
                if node not in self._connected:
                    continue
                if isinstance(reply, str):
                    LOGGER.warning("node %d: %s", node, reply)
                elif (problem := self._welcome(node, reply)) is not None:
                    self._rejected[node] = problem
                    LOGGER.warning("node %d is turned away: %s", node, problem)
                    key = fingerprint(self._connected[node])
                    self.status.turned_away(node, key=key, reason=problem)
        known = {*self._client_of, *self._greeted.values(), *self._rejected}
        for node in self._connected:
            if node not in known:
                greeting = Message(
                    RecordDict(), dst_node_id=node, message_type=HELLO, ttl=HELLO_SECONDS
                )
                (number,) = self.grid.push_messages([greeting])
                if number:
                    self._greeted[str(number)] = node

    def _welcome(self, node: int, reply: Message) -> str | None:
        """Accept a node as the client that it claims to be, or return why not."""
        if reply.metadata.src_node_id != node:
            return "another node answered for it"
        if "refusal" in reply.content:
            return records.refusal_in(reply.content)
        try:
            hello = read_hello(reply.content, num_clients=self._num_clients)
        except Unusable as error:
            return str(error)
        client, name = hello.client, hello.name
        key = self._connected[node]
        identity = key or f"node {node}"
        if self._section.nodes or (self._registry is not None and self._section.authenticated):
            if (problem := self._problem_of_key(client, key)) is not None:
                return problem
        elif self._owner.get(client, identity) != identity and self._section.authenticated:
            return f"client {client} belongs to another node"
        if any(own == client for other, own in self._client_of.items() if other != node):
            return f"client {client} is already present, at another node"
        self._client_of[node] = client
        self._stated[client] = hello.num_examples
        if self._owner.get(client) != identity:
            self._owner[client] = identity
            self._save()
        self.status.seen(client, node_id=node, name=name)
        LOGGER.info("client %d is present (node %d%s)", client, node, f", {name}" if name else "")
        return None

    def _problem_of_key(self, client: int, key: str) -> str | None:
        """Return why a key may not speak for a client, or None."""
        if nodes := self._section.nodes:
            if not key or client >= len(nodes) or same_key(nodes[client]) != key:
                return f"federation.nodes assigns client {client} to another key"
            return None
        assert self._registry is not None, "something says whose key is whose"
        owner = registered(self._registry).get(client)
        if owner is None:
            return (
                f"claims to be client {client}, for which no key is registered: "
                f"fedaux federate register DIR FILE.pub --client {client}"
            )
        if owner != key:
            return f"claims to be client {client}, which is registered with another key"
        return None

    def _save(self) -> None:
        nodes = {str(client): owner for client, owner in sorted(self._owner.items())}
        save_json(self._file, {"version": 1, "run": self.token, "nodes": nodes})


def pulled(grid: Grid, pending: Mapping[str, int]) -> dict[str, Message | str]:
    """Return the answers that have arrived, or why there is none, by the id of the request."""
    try:
        replies = list(grid.pull_messages(list(pending)))
    except httpx.HTTPError as error:  # the connection to the SuperLink; retried until the deadline
        LOGGER.warning("answers cannot be fetched now (%s)", error)
        return {}
    except Exception as error:
        if len(pending) == 1:
            LOGGER.warning("an answer cannot be read", exc_info=error)
            return dict.fromkeys(pending, "the answer cannot be read")
        found: dict[str, Message | str] = {}
        for number, client in pending.items():
            found |= pulled(grid, {number: client})
        return found
    return {
        reply.metadata.reply_to_message_id: failure_in(reply) if reply.has_error() else reply
        for reply in replies
        if reply.metadata.reply_to_message_id in pending
    }


FAILURES = {
    1: "the node could not load its app",
    2: "the node's app failed",
    3: "the message was lost",
    4: "the answer was lost",
    5: "the node is disconnected",
    6: "the node could not start",
    7: "the node does not accept this app",
    8: "the node's process was killed",
}
"""Messages for Flower's error codes."""


def failure_in(reply: Message) -> str:
    """Return the error that Flower reports instead of an answer."""
    return FAILURES.get(reply.error.code, f"Flower reports error {reply.error.code}")
