"""The Flower app of a node: unpacks a request, checks the node's policy, computes and packs the
answer.

On errors the server gets a message without details; these stay in this node's log.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError

from fedaux import __version__
from fedaux.config import ConfigError
from fedaux.federation.node import NodeConfig, load_node
from fedaux.federation.terms import PrepareTerms, Terms, TrainTerms

if TYPE_CHECKING:
    from fedaux.federation.policy import Guard

NODE_KEY, NODE_VARIABLE = "fedaux", "FEDAUX_NODE"
"""Where the path of the node's configuration is given: Flower's --node-config, or the
environment."""
Kind = TypeVar("Kind", bound=Terms)
LOGGER = logging.getLogger("fedaux.node")

app = ClientApp()


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Report which client this node is, and the number of its examples."""

    def answer(config: NodeConfig) -> RecordDict:
        said = {"client": config.number, "name": config.name[:100], "version": __version__}
        said |= {"num_examples": _stated_examples(config)}
        return RecordDict({"hello": ConfigRecord({"text": json.dumps(said)})})

    return _answered(message, context, answer)


@app.query("prepare")
def prepare(message: Message, context: Context) -> Message:
    """Release this client's certainty vector, once, within the node's budget."""

    def answer(config: NodeConfig) -> RecordDict:
        from fedaux.federation import records, work

        terms, limit = _terms(message, config, PrepareTerms), _limit(config)
        expected = records.expected_of(
            work.blank_model(terms, most_bytes=limit).features.state_dict()
        )
        extractor = records.tensors(message.content.get("extractor"), expected)
        public = records.some_tensors(message.content.get("public"), most_bytes=limit)
        guard = _guard(config)
        with guard.alone():
            released = work.prepare(config, guard, terms, extractor, public)
        said = {"client": config.number, "entry": released.entry.to_json()}
        return RecordDict(
            {
                "release": records.arrays({"vector": released.vector}),
                "answer": records.text_record(json.dumps(said)),
            }
        )

    return _answered(message, context, answer)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round on this node's data."""

    def answer(config: NodeConfig) -> RecordDict:
        from fedaux.core.task import head_alone
        from fedaux.federation import records, work

        terms, limit = _terms(message, config, TrainTerms), _limit(config)
        model = work.blank_model(terms, most_bytes=limit)
        trained = model if terms.mode == "full" else head_alone(model)
        expected = records.expected_of(trained.state_dict())
        weights = records.tensors(message.content.get("weights"), expected, wire=terms.wire)
        extractor = None
        if "extractor" in message.content:
            frozen = records.expected_of(model.features.state_dict())
            extractor = records.tensors(message.content["extractor"], frozen)
        guard = _guard(config)
        with guard.alone():
            update = work.train(config, guard, terms, weights, extractor).update
        said: dict[str, Any] = {
            "client": config.number,
            "num_examples": update.num_examples,
            "loss": update.loss,
        }
        if update.entry is not None:
            said["entry"] = update.entry.to_json()
        return RecordDict(
            {
                "weights": records.arrays(update.weights, wire=terms.wire),
                "answer": records.text_record(json.dumps(said)),
            }
        )

    return _answered(message, context, answer)


def node_of(context: Context) -> NodeConfig:
    """Read this node's configuration from the path that its operator gave, never from the
    network."""
    given = context.node_config.get(NODE_KEY) or os.environ.get(NODE_VARIABLE)
    if not isinstance(given, str):
        raise ConfigError([f'--node-config: should hold {NODE_KEY}="/path/to/node.toml"'])
    partition = context.node_config.get("partition-id")
    return load_node(Path(given), partition=partition if isinstance(partition, int) else None)


def _answered(
    message: Message, context: Context, answer: Callable[[NodeConfig], RecordDict]
) -> Message:
    """Return the answer or a refusal; details of unexpected errors do not leave the node."""
    try:
        content = answer(node_of(context))
    except Exception as error:
        reason = _reason(error)
        LOGGER.error("request refused: %s", reason, exc_info=error)
        content = RecordDict({"refusal": ConfigRecord({"text": reason})})
    return Message(content, reply_to=message)


def _reason(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return "the node's configuration is not valid; see its log"
    if isinstance(error, ValidationError):
        return "the request's terms are not valid here; do both sides run the same version?"
    from fedaux.federation.policy import Refusal
    from fedaux.federation.records import Unusable

    if isinstance(error, Refusal | Unusable):
        return f"refused: {error}"
    return "the node failed; see its log"


def _stated_examples(config: NodeConfig) -> int | None:
    """Return the number of examples, as which the server counts this node at most; None on errors,
    which requests report."""
    from fedaux.federation import work

    try:
        return work.count_examples(config)
    except Exception as error:
        LOGGER.error("the examples cannot be counted", exc_info=error)
        return None


def _terms(message: Message, config: NodeConfig, kind: type[Kind]) -> Kind:
    from fedaux.federation.policy import Refusal
    from fedaux.federation.records import text_of

    terms = kind.model_validate_json(text_of(message.content, "terms"))
    if terms.client != config.number:
        raise Refusal(f"this is client {config.number}, not {terms.client}")
    return terms


def _guard(config: NodeConfig) -> Guard:
    from fedaux.federation.policy import Guard

    return Guard(config)


def _limit(config: NodeConfig) -> int:
    return config.limits.message_megabytes * 1_000_000
