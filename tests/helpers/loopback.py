"""A grid without a network: messages go through Flower's own byte format to the real client app, in
this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

import tomli_w
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedaux.config import Experiment
from fedaux.federation.client import app
from fedaux.recipes import merged

TaskIdentity.run_id = 1  # messages want to know which run they belong to
TaskIdentity.node_id = TaskIdentity.task_id = 1
Change = Callable[[Message], Message]


class LoopbackGrid(Grid):
    """Nodes by number, each with its configuration; a test may change their answers, or keep them
    silent."""

    def __init__(self, files: dict[int, Path]) -> None:
        self.files = files
        self.change: dict[int, Change] = {}
        self.silent: set[int] = set()
        self.asked: list[tuple[int, str]] = []
        self._waiting: dict[str, Message] = {}

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.files)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node) for node in self.files]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            message.metadata.__dict__["_src_node_id"] = 1
            self._waiting[message.metadata.message_id] = message
            numbers.append(message.metadata.message_id)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for number in list(message_ids):
            message = self._waiting[number]
            node = message.metadata.dst_node_id
            if node in self.silent and message.metadata.message_type != "query.hello":
                continue
            del self._waiting[number]
            self.asked.append((node, message.metadata.message_type))
            if node not in self.files:
                replies.append(Message(Error(code=5, reason="gone"), reply_to=message))
                continue
            context = Context(0, node, {"fedaux": str(self.files[node])}, RecordDict(), {})
            reply = through_bytes(app(through_bytes(message), context))
            replies.append(self.change[node](reply) if node in self.change else reply)
        return replies


def through_bytes(message: Message) -> Message:
    """Return a message as the other side of a network sees it."""
    contents = {
        number: thing.deflate() for number, thing in get_all_nested_objects(message).items()
    }
    received = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(received, Message)
    received.metadata.__dict__["_message_id"] = message.metadata.message_id
    return received


def asked(file: Path, content: RecordDict, kind: str) -> Message:
    """Return what the node with this configuration answers to one message, both through bytes."""
    message = Message(content, dst_node_id=1000, message_type=kind)
    message.metadata.__dict__["_message_id"] = str(uuid4())
    message.metadata.__dict__["_src_node_id"] = 1
    return through_bytes(
        app(through_bytes(message), Context(0, 1000, {"fedaux": str(file)}, RecordDict(), {}))
    )


def write_nodes(folder: Path, experiment: Experiment, **changes: Any) -> dict[int, Path]:
    """Write a configuration a client, each with its part of the experiment's data; return them by
    node number."""
    files = {}
    for client in range(experiment.split.num_clients):
        table = {
            "client": client,
            "state": "state",
            "device": "cpu",
            "threads": 1,
            "classes": [str(digit) for digit in range(10)],
            "data": experiment.data.model_dump(include={"source", "size"}, exclude_none=True),
            "split": {
                "num_clients": experiment.split.num_clients,
                "alpha": experiment.split.alpha,
                "seed": experiment.seeds[0],
            },
            "privacy": {
                "epsilon": experiment.certainty.epsilon,
                "noise": "simulated",
                "plain_updates": True,
            },
        }
        file = folder / f"node-{client}.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(tomli_w.dumps(merged(table, changes)), encoding="utf-8")
        files[1000 + client] = file
    return files
