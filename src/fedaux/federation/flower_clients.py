"""Clients over Flower's grid: which are present, and what they answer before the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from torch import Tensor

from fedaux.core.messages import (
    ClientRelease,
    ClientState,
    ReleaseRequest,
    TrainRequest,
    Update,
    Weights,
)
from fedaux.core.releases import release_limits, release_width
from fedaux.core.task import Task, rehearsed_rows
from fedaux.federation import answers, records
from fedaux.federation.members import Members, pulled
from fedaux.federation.plan import plan_of
from fedaux.federation.policy import digest_of
from fedaux.federation.records import Unusable
from fedaux.federation.terms import PREPARE, TRAIN, PrepareTerms, RehearsalTerms, TrainTerms
from fedaux.privacy.mechanisms import MECHANISMS

POLL_SECONDS = (0.1, 1.0)
"""Shortest and longest pause between two polls for answers."""
LOGGER = logging.getLogger("fedaux.server")
Answer = TypeVar("Answer", ClientRelease, Update)


class FlowerClients:
    """The clients of one method and seed, each a node of the federation."""

    def __init__(
        self,
        task: Task,
        members: Members,
        *,
        classes: Sequence[str],
        encoder: str | None = None,
    ) -> None:
        """`encoder` is the digest of the one that nodes need, if any."""
        self._task = task
        self._encoder = encoder
        self._members = members
        self._classes = tuple(classes)
        self._reasons: dict[int, str] = {}
        self._have: dict[int, set[str]] = {}
        """Digests of what each client has received: h0 and public images."""
        self.refused: dict[int, str] = {}
        """Clients whose last answer was a refusal, and why."""
        self.traffic = {"down": 0, "up": 0}
        """Bytes of the tensors and texts sent and received."""

    def present(self) -> Sequence[int]:
        """Return the clients whose nodes are connected and answer; waits if there are too few."""
        return self._members.present()

    def sizes(self, clients: Sequence[int]) -> Sequence[int]:
        """Return nothing: a node only claims its n_i, and a false one would choose the number of
        components for all."""
        return ()

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        """Request certainty releases: h0 and the public map down, a vector and its cost up."""
        self._reasons = {}
        contents: dict[int, RecordDict] = {}
        arrays = {name: records.arrays(weights) for name, weights in request.extractors.items()}
        public = {name: records.arrays(tensors) for name, tensors in request.public.items()}
        for client in clients:
            name = self._task.prototype_of[client]
            terms = PrepareTerms(certainty=request.certainty, **self._common(client, request.seed))
            contents[client] = RecordDict(
                {
                    "terms": records.text_record(terms.model_dump_json()),
                    "extractor": arrays[name],
                    "public": public[name],
                }
            )
        for client, content in self._ask(contents, kind=PREPARE, what="release", round=0):
            name = self._task.prototype_of[client]
            release = self._read(
                client, partial(self._release_of, client, content, request.public[name], request)
            )
            if release is not None:
                digest = digest_of("extractor", request.extractors[name])
                self._have.setdefault(client, set()).add(digest)
                self._members.status.answered(client)
                yield release

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        """Request local training: weights down, weights up.

        h0 and public images are sent to clients that do not have them yet, soft labels to all, and
        to each its correction, if the method corrects gradients.
        """
        self._reasons = {}
        arrays = {
            name: records.arrays(own, wire=request.wire) for name, own in request.weights.items()
        }
        frozen = {name: records.arrays(own) for name, own in request.extractors.items()}
        digests = {name: digest_of("extractor", own) for name, own in request.extractors.items()}
        rehearsal, soft_labels, public = self._rehearsal(request), None, None
        if request.soft_labels is not None:
            soft_labels = records.arrays({"beliefs": request.soft_labels})
        contents: dict[int, RecordDict] = {}
        for client in clients:
            name = self._task.prototype_of[client]
            terms = TrainTerms(
                round=request.round,
                local=request.local,
                proximal=request.proximal,
                wire=request.wire,
                extractor=digests.get(name),
                objectives=request.objectives,
                rehearsal=rehearsal,
                mirror=request.mirror,
                corrected=client in request.corrections,
                **self._common(client, request.seed),
            )
            contents[client] = RecordDict(
                {"terms": records.text_record(terms.model_dump_json()), "weights": arrays[name]}
            )
            if client in request.corrections:
                own = request.corrections[client]
                contents[client]["correction"] = records.arrays(own, wire=request.wire)
            held = self._have.get(client, set())
            if name in digests and digests[name] not in held:
                contents[client]["extractor"] = frozen[name]
            if rehearsal is not None and soft_labels is not None:
                contents[client]["beliefs"] = soft_labels
                if rehearsal.digest not in held:
                    public = records.arrays(self._public_images()) if public is None else public
                    contents[client]["rehearsed"] = public
        how = {"round": request.round, "epochs": request.local.epochs}
        for client, content in self._ask(contents, kind=TRAIN, what="train", **how):
            name = self._task.prototype_of[client]
            update = self._read(
                client, partial(self._update, client, content, request.weights[name], request)
            )
            if update is not None:
                held = self._have.setdefault(client, set())
                held |= {digests[name]} if name in digests else set()
                held |= {rehearsal.digest} if rehearsal is not None else set()
                self._members.status.answered(client)
                yield update
        for client in self._reasons:
            self._have.pop(client, None)  # it may have lost its state

    def _rehearsal(self, request: TrainRequest) -> RehearsalTerms | None:
        """Return the terms of rehearsal, if clients rehearse."""
        if request.soft_labels is None:
            return None
        return RehearsalTerms(
            examples=len(request.soft_labels),
            batch_size=request.rehearsed,
            digest=self._public_digest,
        )

    @cached_property
    def _public_digest(self) -> str:
        return digest_of("rehearsed", self._public_images())

    def _public_images(self) -> dict[str, Tensor]:
        """Return the images that clients rehearse, the same in all rounds; features in half
        precision, in which they are stored."""
        images = self._task.distill_set[rehearsed_rows(self._task)]
        return {"images": images.half() if images.is_floating_point() else images}

    def reasons(self) -> Mapping[int, str]:
        """Return why clients did not answer, or not with a usable answer."""
        return dict(self._reasons)

    def class_shares(self, client: int) -> Tensor:
        """Refuse: nodes tell nothing about their classes."""
        raise ValueError("class shares: nodes do not tell them; run the method in the simulator")

    def client_states(self) -> Mapping[int, ClientState]:
        """Return nothing: nodes keep their state on their own disks."""
        return {}

    def load_client_states(self, kept: Mapping[int, ClientState]) -> None:
        """Do nothing, for the same reason."""

    def _common(self, client: int, seed: int) -> dict[str, Any]:
        """Return the terms that every request has."""
        task, name = self._task, self._task.prototype_of[client]
        (prototype,) = [one for one in task.experiment.prototypes if one.name == name]
        data = task.experiment.data
        return {
            "client": client,
            "run": f"{self._members.token} {task.method.name} {task.seed}",
            "plan": plan_of(task.experiment, run=self._members.token),
            "seed": seed,
            "prototype": prototype.model_copy(
                update={"clients": None}
            ),  # other clients' ids are not sent
            "mode": task.experiment.mode,
            "image_shape": task.input_shape,
            "encoder": self._encoder,
            "classes": self._classes,
            "channel_mean": data.channel_mean,
            "channel_deviation": data.channel_deviation,
            "batch_size": task.experiment.evaluation.batch_size,
            "precision": task.experiment.engine.precision,
        }

    def _ask(
        self,
        contents: Mapping[int, RecordDict],
        *,
        kind: str,
        what: str,
        round: int,
        epochs: int = 0,
    ) -> Iterator[tuple[int, RecordDict]]:
        """Send each client its message and yield the answers as they arrive, until the deadline."""
        seconds = self._task.experiment.federation.deadline
        self._members.status.asked(list(contents), what=what, round=round, epochs=epochs)
        self.traffic["down"] += sum(records.size_of(content) for content in contents.values())
        began = time.monotonic()
        ends = began + seconds
        reading = 0.0
        pending: dict[str, int] = {}
        nodes = {client: self._members.node(client) for client in contents}
        for client, content in contents.items():
            if (node := nodes[client]) is None:
                self._give_up(client, "not connected")
                continue
            message = Message(
                content, dst_node_id=node, message_type=kind, ttl=seconds, group_id=str(round)
            )
            pushed = list(self._members.grid.push_messages([message]))
            if pushed and pushed[0]:
                pending[str(pushed[0])] = client
            else:
                self._give_up(client, "the message could not be sent")
        sent = time.monotonic() - began
        pause = POLL_SECONDS[0]
        while pending and time.monotonic() < ends:
            looked = time.monotonic()
            replies = pulled(self._members.grid, pending)
            reading += time.monotonic() - looked if replies else 0.0
            for number, reply in replies.items():
                client = pending.pop(number)
                if isinstance(reply, str):
                    self._members.doubt(client)
                    self._give_up(client, reply)
                elif reply.metadata.src_node_id != nodes[client]:
                    self._give_up(client, "another node answered")
                else:
                    self.traffic["up"] += records.size_of(reply.content)
                    if "refusal" in reply.content:
                        self.refused[client] = records.refusal_in(reply.content)
                        self._give_up(client, self.refused[client])
                    else:
                        self.refused.pop(client, None)
                        yield client, reply.content
            pause = POLL_SECONDS[0] if replies else min(1.5 * pause, POLL_SECONDS[1])
            if pending:
                time.sleep(min(pause, max(0.0, ends - time.monotonic())))
        LOGGER.info(
            "%s: %.2f s in total; sent in %.2f s, answers fetched in %.2f s",
            *(what, time.monotonic() - began, sent, reading),
        )
        for client in pending.values():
            self._members.doubt(client)
            self._give_up(client, f"no answer within {seconds:g} s")

    def _read(self, client: int, parse: Callable[[], Answer]) -> Answer | None:
        """Return a parsed answer, or None for one that cannot be used; no answer ends the run."""
        try:
            return parse()
        except answers.Misstated as error:
            self._members.doubt(client)  # its next greeting states the number again
            self._reject(client, str(error))
        except Unusable as error:
            self._reject(client, str(error))
        except Exception as error:  # a defect of the parser must not end the run for everybody
            LOGGER.warning("client %d: its answer cannot be read", client, exc_info=error)
            self._reject(client, "the answer cannot be read")
        return None

    def _reject(self, client: int, reason: str) -> None:
        """Leave out a client whose answer cannot be used."""
        self._reasons[client] = reason
        self._members.status.rejected(client, reason)
        LOGGER.warning("client %d: its answer is rejected: %s", client, reason)

    def _give_up(self, client: int, reason: str) -> None:
        self._reasons[client] = reason
        self._members.status.missing(client, reason)
        LOGGER.warning("client %d: %s", client, reason)

    def _release_of(
        self,
        client: int,
        content: RecordDict,
        public: Mapping[str, Tensor],
        request: ReleaseRequest,
    ) -> ClientRelease:
        """Return a usable release. Raises Unusable."""
        task, tensors, section = self._task, dict(public), request.certainty
        mechanism = MECHANISMS[section.mechanism](section)
        release = answers.read_release(
            content,
            client=client,
            certainty=section,
            purpose=mechanism.purpose,
            width=release_width(task, task.prototype_of[client], tensors, section),
            limits=lambda examples: release_limits(section, tensors, num_examples=examples),
            most_examples=self._members.most_examples(client),
        )
        vector = release.vector
        stated = release.entry.num_examples
        counted = self._counted(client, stated)
        if counted < stated and mechanism.is_sum:  # sums grow with the claim
            vector = vector * (counted / stated)
        return replace(release, vector=vector.to(task.device))

    def _update(
        self, client: int, content: RecordDict, sent: Weights, request: TrainRequest
    ) -> Update:
        """Return an update with tensors of the right shapes. Raises Unusable."""
        update = answers.read_update(
            content,
            client=client,
            sent=sent,
            request=request,
            most_examples=self._members.most_examples(client),
        )
        weights = {name: one.to(self._task.device) for name, one in update.weights.items()}
        counted = self._counted(client, update.num_examples)
        return replace(update, weights=weights, num_examples=counted)

    def _counted(self, client: int, stated: int) -> int:
        """Return the number of examples credited to a client that states `stated`."""
        counted = min(stated, self._members.plausible_examples(client))
        if counted < stated:
            LOGGER.warning(
                "client %d states %d examples and counts as %d (federation.largest_share)",
                *(client, stated, counted),
            )
        return counted
