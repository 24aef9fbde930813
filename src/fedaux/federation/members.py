"""Who belongs to a federation: which node speaks for which client, for how long, and who is there now."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedaux.config import Federation
from fedaux.federation import records
from fedaux.federation.terms import HELLO
from fedaux.files import read_json, save_json

FILE = "federation.json"
"""In the run directory: what the run is called at the nodes, and which node each client belongs to."""
LOGGER = logging.getLogger("fedaux.core.weights")
HELLO_SECONDS = 3600.0
"""How long a node may take to say who it is, while others work."""
WAIT_SECONDS = 0.5


class Board(Protocol):
    """Where the state of the clients is shown."""

    def seen(self, client: int, *, node_id: int | None = None, name: str = "") -> None:
        """A node speaks for this client."""

    def asked(self, clients: Sequence[int], *, what: str, round: int) -> None:
        """Clients are busy."""

    def answered(self, client: int) -> None:
        """A client has answered."""

    def missing(self, client: int, reason: str) -> None:
        """A client was given up."""

    def gone(self, clients: Sequence[int]) -> None:
        """Nodes are no longer connected."""


class Members:
    """The nodes of a run, from greeting to absence.

    A node that is new, or that has not answered in time, is greeted, and counts as present once it has said which
    client it speaks for. Nobody waits for that, except at the beginning and where nobody is there at all. The node of
    a client is written down: another one that claims the same client is turned away.
    """

    def __init__(
        self, grid: Grid, directory: Path, *, section: Federation, num_clients: int, board: Board
    ) -> None:
        self.grid = grid
        self.board = board
        self._section = section
        self._num_clients = num_clients
        self._file = directory / FILE
        stored: dict[str, Any] = read_json(self._file) if self._file.exists() else {}
        self.token: str = stored.get("run") or secrets.token_hex(16)
        self._owner: dict[int, str] = {
            int(client): node for client, node in stored.get("nodes", {}).items()
        }
        self._client_of: dict[int, int] = {}
        """Of nodes that have said who they are and are trusted to answer."""
        self._names: dict[int, str] = {}
        self._greeted: dict[str, int] = {}
        """Nodes by the greeting they have not answered yet."""
        self._turned_away: dict[int, str] = {}
        self._connected: Mapping[int, str] = {}
        self._begun = False
        self._save()

    def present(self) -> Sequence[int]:
        """Return the clients that can be asked, rising. Raises ValueError where there are none for too long."""
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
            turned = "".join(
                f"; node {node}: {reason}" for node, reason in self._turned_away.items()
            )
            raise ValueError(
                f"no client is there: {self._section.wait_seconds:g} s (federation.wait_seconds) have passed{turned}. "
                "Finished rounds are safe; go on with resume=true"
            )
        if missing := sorted(set(range(self._num_clients)) - set(clients)):
            LOGGER.warning("not there: clients %s", ", ".join(map(str, missing)))
        self._begun = True
        return clients

    def node(self, client: int) -> int | None:
        """Return the node that speaks for a client, if it is there."""
        return next((node for node, own in self._client_of.items() if own == client), None)

    def doubt(self, client: int) -> None:
        """Take a client for absent until its node answers a greeting."""
        if (node := self.node(client)) is not None:
            del self._client_of[node]

    def _look(self) -> None:
        """See who is connected, read answers to greetings, and greet whoever is not known to answer."""
        self._connected = {info.node_id: key_of(info.public_key) for info in self.grid.get_nodes()}
        for node in [node for node in self._client_of if node not in self._connected]:
            self.board.gone([self._client_of.pop(node)])
        self._turned_away = {
            node: why for node, why in self._turned_away.items() if node in self._connected
        }
        if self._greeted:
            for number, reply in pulled(self.grid, self._greeted).items():
                node = self._greeted.pop(number)
                if node not in self._connected:
                    continue
                if isinstance(reply, str):
                    LOGGER.warning("node %d: %s", node, reply)
                elif (problem := self._welcome(node, reply)) is not None:
                    self._turned_away[node] = problem
                    LOGGER.warning("node %d is turned away: %s", node, problem)
        known = {*self._client_of, *self._greeted.values(), *self._turned_away}
        for node in self._connected:
            if node not in known:
                greeting = Message(
                    RecordDict(), dst_node_id=node, message_type=HELLO, ttl=HELLO_SECONDS
                )
                (number,) = self.grid.push_messages([greeting])
                if number:
                    self._greeted[str(number)] = node

    def _welcome(self, node: int, reply: Message) -> str | None:
        """Take a node for the client it says it is, or say why not."""
        if reply.metadata.src_node_id != node:
            return "another node answered for it"
        if "refusal" in reply.content:
            try:
                return records.reason_of(records.text_of(reply.content, "refusal"))
            except records.Unusable:
                return "refused, without saying why"
        try:
            said = json.loads(records.text_of(reply.content, "hello"))
            client, name = said["client"], records.reason_of(str(said.get("name", "")))[:100]
        except (ValueError, KeyError, TypeError, AttributeError):
            return "said nothing that could be read"
        if type(client) is not int or not 0 <= client < self._num_clients:
            return f"speaks for client {records.reason_of(str(client))[:20]}, of which there are {self._num_clients}"
        key = self._connected[node]
        identity = key or f"node {node}"
        if self._section.nodes:
            if (
                not key
                or client >= len(self._section.nodes)
                or same_key(self._section.nodes[client]) != key
            ):
                return f"federation.nodes gives client {client} to another key"
        elif self._owner.get(client, identity) != identity and self._section.authenticated:
            return f"client {client} belongs to another node"
        if any(own == client for other, own in self._client_of.items() if other != node):
            return f"client {client} is there already, at another node"
        self._client_of[node] = client
        if self._owner.get(client) != identity:
            self._owner[client] = identity
            self._save()
        self.board.seen(client, node_id=node, name=name)
        LOGGER.info("client %d is there (node %d%s)", client, node, f", {name}" if name else "")
        return None

    def _save(self) -> None:
        nodes = {str(client): owner for client, owner in sorted(self._owner.items())}
        save_json(self._file, {"version": 1, "run": self.token, "nodes": nodes})


def key_of(public_key: bytes) -> str:
    """Return a node's public key as its .pub file has it, without the comment; nothing where there is none."""
    try:
        key = serialization.load_pem_public_key(public_key)
        text = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    except (ValueError, TypeError):
        return ""
    return text.decode()


def same_key(text: str) -> str:
    """Return a public key without its comment."""
    return " ".join(text.split()[:2])


def pulled(grid: Grid, pending: Mapping[str, int]) -> dict[str, Message | str]:
    """Return the answers that have come, by the message they answer: with content, or why there is none."""
    try:
        replies = list(grid.pull_messages(list(pending)))
    except (
        httpx.HTTPError
    ) as error:  # between this process and the SuperLink; the deadline says how long to try
        LOGGER.warning("answers cannot be fetched now (%s)", error)
        return {}
    except Exception as error:
        if len(pending) == 1:  # this one cannot be read, and never will be
            LOGGER.warning("an answer cannot be read", exc_info=error)
            return dict.fromkeys(pending, "the answer cannot be read")
        found: dict[str, Message | str] = {}
        for number, client in pending.items():
            found |= pulled(grid, {number: client})
        return found
    told: dict[str, Message | str] = {}
    for reply in replies:
        number = reply.metadata.reply_to_message_id
        if number in pending:
            told[number] = failure_in(reply) if reply.has_error() else reply
    return told


FAILURES = {
    1: "the node could not load its app",
    2: "the node's app failed",
    3: "the message was lost on its way",
    4: "the answer was lost on its way",
    5: "the node is gone",
    6: "the node could not begin",
    7: "the node does not take this app",
    8: "the node's process was killed",
}
"""Flower's error codes in words."""


def failure_in(reply: Message) -> str:
    """Say what Flower reports instead of an answer."""
    return FAILURES.get(reply.error.code, f"Flower reports error {reply.error.code}")
