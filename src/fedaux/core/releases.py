"""One-time releases of clients before training: requests, checks and scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.core.messages import (
    ClientRelease,
    Clients,
    ReleaseRequest,
    Weights,
    problem_of_release,
)
from fedaux.core.task import Preparation, Task, build_models, extract
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Limits
from fedaux.privacy.mechanisms import (
    MECHANISMS,
    Public,
    SimulatedNoise,
)

if TYPE_CHECKING:
    from fedaux.privacy.classes import ClassEstimate

ChoosePublic = Callable[[dict[str, Public], Certainty], dict[str, Public]]
"""Takes the new public maps of a release and returns the maps to use: the maps of an interrupted
attempt, if there are any. On a GPU new maps can differ in the last bit, and clients would pay again
for a release under them."""


def keep_new(public: dict[str, Public], section: Certainty) -> dict[str, Public]:
    """Use the new public maps."""
    return public


@dataclass(frozen=True)
class Collected:
    """What clients have released."""

    releases: Mapping[int, ClientRelease]
    """The usable ones, by client."""
    public: Mapping[str, Public]
    """The public map that each prototype's clients have used."""


def publish(
    task: Task,
    clients: Clients,
    section: Certainty,
    extractors: Mapping[str, Weights],
    present: Sequence[int],
) -> dict[str, Public]:
    """Return the public map of each prototype, from public examples and numbers alone.

    The map of a mechanism that releases sums follows from all public examples, not from negatives
    alone.
    """
    mechanism, public = MECHANISMS[section.mechanism](section), dict[str, Public]()
    examples = [task.negatives] if mechanism.reads_features else []
    if examples and mechanism.is_sum:
        examples.append(task.distill_set)
    for name in extractors:
        found = [extract(task, name, extractors[name], own) for own in examples]
        negatives = torch.cat(found) if found else torch.zeros(0, device=task.device)
        own = [client for client in present if task.prototype_of[client] == name]
        sizes = clients.sizes(own or present)
        public[name] = mechanism.publish(negatives, num_classes=task.num_classes, sizes=sizes)
    return public


def request_releases(
    task: Task,
    clients: Clients,
    chosen: Sequence[int],
    *,
    section: Certainty,
    extractors: Mapping[str, Weights],
    public: Mapping[str, Public],
) -> tuple[dict[int, ClientRelease], list[LedgerEntry], int, int]:
    """Ask clients for releases; return the usable ones by id, the ledger entries of the others, and
    bytes down and up.

    An unusable release causes a warning; a client that is selected to train later is asked again.
    """
    request = ReleaseRequest(extractors, public, section, task.seed)
    widths = {
        name: release_width(task, name, public[name], section)
        for name in {task.prototype_of[one] for one in chosen}
    }
    answers: dict[int, ClientRelease] = {}
    wasted: list[LedgerEntry] = []
    bytes_up = 0
    for answer in clients.release(chosen, request) if chosen else ():
        if answer.client not in chosen:
            continue
        bytes_up += answer.num_bytes()
        name = task.prototype_of[answer.client]
        limits = release_limits(section, public[name], num_examples=answer.entry.num_examples)
        problem = problem_of_release(answer.vector, width=widths[name], limits=limits)
        if problem is None:
            answers[answer.client] = answer
        else:
            wasted.append(answer.entry)  # even an unusable release has left the client
            from fedaux.formatting import client_label  # late: a round needs no text

            name = client_label(answer.client, task.experiment.data.client_names)
            warnings.warn(f"{name}: {problem}; it is left out", stacklevel=2)
    bytes_down = sum(request.num_bytes(task.prototype_of[client]) for client in chosen)
    return dict(sorted(answers.items())), wasted, bytes_down, bytes_up


def release_limits(section: Certainty, public: Public, *, num_examples: int) -> Limits:
    """Return the possible range of a release of n examples."""
    mechanism = MECHANISMS[section.mechanism](section)
    return mechanism.limits(max(1, num_examples), public)


def release_width(task: Task, prototype: str, public: Public, section: Certainty) -> int:
    """Return the length of a release: the length of one that is made from two blank examples."""

    def release() -> int:
        features = torch.zeros(2, build_models(task)[prototype].feature_width, device=task.device)
        labels = torch.zeros(2, dtype=torch.int64, device=task.device)
        noise = SimulatedNoise(seeding.generator(0, "width of a release"))
        mechanism = MECHANISMS[section.mechanism](section)
        made = mechanism.release(features, dict(public), noise=noise, labels=labels)
        return len(made.vector)

    certainty = section.model_dump_json()
    shapes = str({key: tuple(tensor.shape) for key, tensor in sorted(public.items())})
    return task.compute.once(
        ("width of a release", task.architecture(prototype), certainty, shapes), release
    )


@runtime_checkable
class TellsClasses(Protocol):
    """A mechanism whose releases tell which client holds which class."""

    def estimate(self, vectors: Tensor, sigmas: Tensor, public: Public) -> ClassEstimate:
        """Return what releases [K, D] with noise sigmas [K] tell about the classes."""
        ...


ClassEstimates = dict[str, tuple[list[int], "ClassEstimate"]]
"""By prototype: clients that have released class sums or counts, and what these tell."""


def class_estimates(
    task: Task,
    releases: Mapping[int, ClientRelease],
    public: Mapping[str, Public],
    section: Certainty,
) -> ClassEstimates:
    """Return the clients of each prototype that have released class sums or counts, and what these
    tell.

    Raises ValueError if nobody has, or if releases are of another kind.
    """
    mechanism = MECHANISMS[section.mechanism](section)
    if not isinstance(mechanism, TellsClasses):
        raise ValueError(f"method {task.method.name}: its mechanism should be classes or counts")
    found = {}
    for name, own in public.items():
        members = [client for client in sorted(releases) if task.prototype_of[client] == name]
        if members:
            vectors, sigmas = stacked(releases, members, device=task.device)
            found[name] = members, mechanism.estimate(vectors, sigmas, own)
    if not found:
        raise ValueError(f"method {task.method.name}: no client released class sums or counts")
    return found


def stacked(
    releases: Mapping[int, ClientRelease], members: Sequence[int], *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return released vectors [K, D] and the sigmas of their noise [K]."""
    vectors = torch.stack([releases[client].vector for client in members])
    sigmas = torch.tensor([releases[client].entry.sigma for client in members])
    return vectors.to(device, torch.float64), sigmas.to(device, torch.float64)


class Scorer:
    """Computes certainty scores, and estimates of the clients' classes, from releases."""

    def __init__(self, task: Task, preparation: Preparation) -> None:
        self._task = task
        self._preparation = preparation
        self._estimated: tuple[Mapping[int, ClientRelease], ClassEstimates] | None = None

    @property
    def _section(self) -> Certainty:
        """The settings of the release. Raises ValueError for a method without one."""
        if sections := self._task.asks.releases:
            return sections[0]
        raise ValueError(
            f"method {self._task.method.name}: uses what clients release, and its `asks` names no "
            "release"
        )

    @cached_property
    def projected(self) -> dict[str, Tensor]:
        """The projected features [N, k] of the distill set, by prototype."""
        return {
            name: self.project(name, self._task.distill_set) for name in self._preparation.public
        }

    def project(self, prototype: str, images: Tensor) -> Tensor:
        """Return the projected features [N, k] of images under h0."""
        prepared, section = self._preparation, self._section
        features = extract(self._task, prototype, prepared.extractors[prototype], images)
        mechanism = MECHANISMS[section.mechanism](section)
        return mechanism.project(features, prepared.public[prototype])

    def class_estimates(self, releases: Mapping[int, ClientRelease]) -> ClassEstimates:
        """Return the estimates of `class_estimates`, computed once for the same releases."""
        if self._estimated is None or self._estimated[0] is not releases:
            public, section = self._preparation.public, self._section
            found = class_estimates(self._task, releases, public, section)
            self._estimated = releases, found
        return self._estimated[1]

    def log_scores(
        self,
        releases: Mapping[int, ClientRelease],
        chosen: Sequence[int],
        projected: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N] of clients, on the distill set or other projected features."""
        mechanism = MECHANISMS[self._section.mechanism](self._section)
        projected = self.projected if projected is None else projected
        rows: dict[int, Tensor] = {}
        for name, features in projected.items():
            pool = sorted(releases) if mechanism.scores == "together" else chosen
            members = [client for client in pool if self._task.prototype_of[client] == name]
            if members:
                vectors, sigmas = stacked(releases, members, device=features.device)
                counts = [releases[client].entry.num_examples for client in members]
                scores = mechanism.log_scores(
                    vectors.to(features),
                    sigmas.to(features),
                    self._preparation.public[name],
                    features,
                    sizes=torch.tensor(counts).to(features),
                )
                rows |= dict(zip(members, scores, strict=True))
        return torch.stack([rows[client] for client in chosen])
