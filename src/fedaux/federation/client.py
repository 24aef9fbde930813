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

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from pydantic import ValidationError

from fedaux import __version__
from fedaux.config import ConfigError
from fedaux.federation.node import NodeConfig, load_started
from fedaux.federation.terms import PrepareTerms, Terms, TrainTerms
from fedaux.recipes import flatten

if TYPE_CHECKING:
    from fedaux.core.messages import ClientRelease, Update
    from fedaux.federation.policy import Guard, Refusal
    from fedaux.federation.work import Answer

NODE_KEY, NODE_VARIABLE = "fedaux", "FEDAUX_NODE"
"""Where the path of the node's configuration is given: Flower's --node-config, or the
environment."""
LARGEST: dict[type, float] = {int: 2**31, float: 1e30}
"""Largest numbers in the terms of a request: they are computed with in single precision."""
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
        _log_plan(terms)
        with guard.alone():
            answered = work.prepare(config, guard, terms, extractor, public)
            release = answered.content
            vector = records.arrays({"vector": release.vector})
            what = f"certainty scores by {release.entry.mechanism}"
            said = _recorded(guard, terms, answered, vector, what=what, kind="release")
        return RecordDict({"release": vector, "answer": records.text_record(json.dumps(said))})

    return _answered(message, context, answer)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one round on this node's data."""

    def answer(config: NodeConfig) -> RecordDict:
        from fedaux.core.task import head_alone
        from fedaux.federation import records, work
        from fedaux.federation.rehearsal import Received, expected_tensors

        terms, limit = _terms(message, config, TrainTerms), _limit(config)
        model = work.blank_model(terms, most_bytes=limit)
        trained = model if terms.mode == "full" else head_alone(model)
        expected = records.expected_of(trained.state_dict())
        weights = records.tensors(message.content.get("weights"), expected, wire=terms.wire)
        extractor = None
        if "extractor" in message.content:
            frozen = records.expected_of(model.features.state_dict())
            extractor = records.tensors(message.content["extractor"], frozen)
        rehearsal = None
        if terms.rehearsal is not None:
            expected_labels, public = expected_tensors(terms, most_bytes=limit)
            labels = records.tensors(message.content.get("beliefs"), expected_labels)
            images = None
            if "rehearsed" in message.content:
                images = records.tensors(message.content["rehearsed"], public)["images"]
            rehearsal = Received(labels["beliefs"], images)
        correction = None
        if terms.corrected:
            parameters = records.expected_of(dict(trained.named_parameters()))
            correction = records.tensors(
                message.content.get("correction"), parameters, wire=terms.wire
            )
        guard = _guard(config)
        if terms.round == 1:
            _log_plan(terms)
        with guard.alone():
            answered = work.train(config, guard, terms, weights, extractor, rehearsal, correction)
            update = answered.content
            sent = records.arrays(update.weights, wire=terms.wire)
            how = "with DP-SGD" if update.entry is not None else "without differential privacy"
            what = f"update of round {terms.round}, {how}"
            said = _recorded(guard, terms, answered, sent, what=what, kind="update")
        said |= {"num_examples": update.num_examples, "loss": update.loss}
        return RecordDict({"weights": sent, "answer": records.text_record(json.dumps(said))})

    return _answered(message, context, answer)


def _log_plan(terms: Terms) -> None:
    """Log what the server plans to ask of this node."""
    from fedaux.federation.records import reason_of
    from fedaux.privacy.mechanisms import what_is_released

    plan = terms.plan
    scores = " and ".join(
        f"{plan.releases} releases of {what_is_released(section)} by "
        f"{reason_of(section.mechanism)}, epsilon = {section.epsilon:g} at delta = "
        f"{section.delta:g} each"
        for section in plan.certainty
    )
    scores = scores or "no releases"
    how = "with DP-SGD" if plan.local and plan.local.privacy else "without differential privacy"
    if "rehearsal" in plan.objectives:
        how += ", which rehearse public images of the server"
    LOGGER.info(
        "run %s plans %s; %d updates %s; public data: %s",
        *(reason_of(plan.run), scores, plan.updates, how, reason_of(plan.public) or "not named"),
    )


def _recorded(
    guard: Guard,
    terms: PrepareTerms | TrainTerms,
    answer: Answer[ClientRelease] | Answer[Update],
    sent: ArrayRecord,
    *,
    what: str,
    kind: str,
) -> dict[str, Any]:
    """Record and log what leaves, its price, and the hash by which the record can be checked
    later; return what every answer says."""
    from fedaux.federation import records

    entry, price = answer.content.entry, ""
    guard.record_sent(
        kind=kind,
        request=answer.request,
        run=terms.run,
        round=terms.round if isinstance(terms, TrainTerms) else None,
        data=sent[records.ALL].data,
        entry=entry,
    )
    if entry is not None:
        price = f"; epsilon = {entry.epsilon:.4g} at delta = {entry.delta:g}"
    again = ", sent again at no cost" if answer.repeated else ""
    LOGGER.info(
        "run %s: %s%s%s; total epsilon = %.4g; record %s",
        *(records.reason_of(terms.run), what, again, price),
        *(guard.spent(guard.counted()), guard.head()),
    )
    said: dict[str, Any] = {"client": answer.content.client}
    return said if entry is None else said | {"entry": entry.to_json()}


def node_of(context: Context) -> NodeConfig:
    """Return this node's configuration as it was at its start, from the path that its operator
    gave, never from the network."""
    given = context.node_config.get(NODE_KEY) or os.environ.get(NODE_VARIABLE)
    if not isinstance(given, str):
        raise ConfigError([f'--node-config: should hold {NODE_KEY}="/path/to/node.toml"'])
    partition = context.node_config.get("partition-id")
    return load_started(Path(given), partition=partition if isinstance(partition, int) else None)


def _answered(
    message: Message, context: Context, answer: Callable[[NodeConfig], RecordDict]
) -> Message:
    """Return the answer or a refusal; details of unexpected errors do not leave the node."""
    try:
        content = answer(node_of(context))
    except Exception as error:
        content = RecordDict({"refusal": ConfigRecord({"text": _reason(message, error)})})
    return Message(content, reply_to=message)


def _reason(message: Message, error: Exception) -> str:
    """Return what the server learns of an error, and log the rest."""
    from fedaux.federation.policy import Refusal
    from fedaux.federation.records import Unusable

    asked = message.metadata.message_type
    if isinstance(error, Refusal | Unusable):
        detail = f" ({error.detail})" if isinstance(error, Refusal) and error.detail else ""
        LOGGER.warning("%s refused: %s%s", asked, error, detail)
        return f"refused: {error}"
    if isinstance(error, ConfigError):
        LOGGER.error("%s cannot be answered: %s", asked, error)
        return "the node's configuration is not valid; see its log"
    LOGGER.error("%s cannot be answered", asked, exc_info=error)
    return "the node failed; see its log"


def _stated_examples(config: NodeConfig) -> int | None:
    """Return the number of examples, the most that the server counts for this node; None on
    errors, which requests report."""
    from fedaux.federation import work

    try:
        return work.count_examples(config)
    except Exception as error:
        LOGGER.error("the examples cannot be counted", exc_info=error)
        return None


def _terms(message: Message, config: NodeConfig, kind: type[Kind]) -> Kind:
    from fedaux.federation.policy import Refusal
    from fedaux.federation.records import reason_of, text_of

    text = text_of(message.content, "terms")
    try:
        terms = kind.model_validate_json(text)
    except ValidationError as error:
        raise _unreadable(text, error) from None
    if terms.version != __version__:
        LOGGER.warning(
            "the server runs fedaux %s, this node %s", reason_of(terms.version), __version__
        )
    if terms.client != config.number:
        raise Refusal(f"this is client {config.number}, not {terms.client}")
    for name, value in flatten(terms.model_dump(exclude={"seed"})).items():
        for number in value if isinstance(value, tuple) else (value,):
            most = LARGEST.get(type(number))
            if most is not None and abs(number) > most:
                shown = max(-1e308, min(1e308, number))  # whole numbers may be beyond a float
                raise Refusal(f"{name} = {shown:g}: should be at most {most:g} in size")
    return terms


def _unreadable(text: str, error: ValidationError) -> Refusal:
    """Return the refusal of terms that cannot be read, with both versions if they differ."""
    from fedaux.federation.policy import Refusal
    from fedaux.federation.records import reason_of

    where = sorted({".".join(map(str, one["loc"])) or "the whole" for one in error.errors()})
    detail = reason_of(f"not valid: {', '.join(where)}")
    try:
        version = json.loads(text).get("version")
    except (ValueError, AttributeError, RecursionError):
        version = None
    if version == __version__:
        return Refusal("the terms of the request are not valid", detail=detail)
    stated = reason_of(version)[:40] if isinstance(version, str) else "an older version"
    return Refusal(
        f"the terms of the request cannot be read: the server runs fedaux {stated}, this node "
        f"{__version__}",
        detail=detail,
    )


def _guard(config: NodeConfig) -> Guard:
    from fedaux.federation.policy import Guard

    return Guard(config)


def _limit(config: NodeConfig) -> int:
    return config.limits.message_megabytes * 1_000_000
