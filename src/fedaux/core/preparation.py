"""The preparation phase (Algorithm 1): h0, the clients' releases, and their scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Certainty
from fedaux.core.messages import (
    Clients,
    ReleaseRequest,
    ScoreRelease,
    Weights,
    num_bytes,
    problem_of_release,
)
from fedaux.core.round_log import Clock
from fedaux.core.task import (
    Callback,
    Preparation,
    State,
    Task,
    build_models,
    extract,
    objectives_of,
    rehearsed_rows,
    trainable_models,
)
from fedaux.core.weights import snapshot
from fedaux.privacy.classes import ClassEstimate, ClassSums
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Limits, limits_of
from fedaux.privacy.mechanisms import (
    MECHANISMS,
    Mechanism,
    Public,
    SimulatedNoise,
    publish_map,
    release_of,
    takes_labels,
)

if TYPE_CHECKING:
    from fedaux.models import SplitModel


def prepare(
    task: Task,
    clients: Clients,
    *,
    extractor: Callable[[str, SplitModel], Weights],
    callback: Callback,
    settle: Callable[[dict[str, Public], str | None], dict[str, Public]] = lambda own, _: own,
) -> tuple[State, Preparation]:
    """Run the preparation phase (Algorithm 1). `extractor(prototype, model)` returns the pretrained
    h0.

    `settle` may return the public map of an interrupted attempt instead of the new one, for a
    mechanism or, if None, that of the recipe. On a GPU they can differ in the last bit, and clients
    would pay again for a release under the new map.
    """
    clock = Clock(task, 0, callback)
    models, trained = build_models(task), trainable_models(task)
    extractors: dict[str, Weights] = {}
    public: dict[str, Public] = {}
    releases: dict[int, ScoreRelease] = {}
    wasted: list[LedgerEntry] = []
    bytes_up = bytes_down = 0
    if task.method.from_h0:
        with clock.phase("pretrain"):
            for name, model in models.items():
                model.features.load_state_dict(extractor(name, model))
                if task.experiment.mode == "full":
                    trained[name].features.load_state_dict(model.features.state_dict())
    linear = task.experiment.mode == "linear"
    if task.method.scores_first or linear:
        extractors = {name: snapshot(model.features) for name, model in models.items()}
    present = clients.present()
    if task.method.scores_first:
        with clock.phase("certify"):
            mechanism = mechanism_of(task)
            for name in models:
                negatives = extract(task, name, extractors[name], task.negatives)
                public[name] = publish_map(
                    mechanism,
                    negatives,
                    num_classes=task.num_classes,
                    sizes=clients.sizes(users_of(task, name, present)),
                )
            public = settle(public, task.method.mechanism)
            releases, wasted, bytes_down, bytes_up = release_scores(
                task, clients, present, extractors=extractors, public=public
            )
    if task.method.start == "private-head":
        if not releases and (reasons := clients.reasons()):
            why = "".join(f"; client {client}: {text}" for client, text in sorted(reasons.items()))
            raise ValueError(f"no client released class sums for the private head{why}")
        with clock.phase("head"):
            set_private_heads(
                task, trained, releases=releases, extractors=extractors, public=public
            )
    if task.method.calibrated or task.method.head_by_class:
        from fedaux.core.private_head import require_linear

        for name, model in trained.items():
            require_linear(model.head, prototype=name)
    if linear and not task.method.scores_first:  # those that release scores have h0 already
        bytes_down = sum(num_bytes(extractors[task.prototype_of[client]]) for client in present)
    bytes_down += len(present) * rehearsed_bytes(task)
    if task.method.is_bound:  # no federation, so nothing is sent
        bytes_down = 0
    state = State(round=0, weights={name: snapshot(model) for name, model in trained.items()})
    if task.method.heads:
        from fedaux.core.heads import release_heads  # late: few methods need it

        with clock.phase("heads"):
            state, down, up = release_heads(
                task, clients, state, list(releases), extractors=extractors, settle=settle
            )
        bytes_down, bytes_up = bytes_down + down, bytes_up + up
        wasted += state.ledger
    preparation = Preparation(extractors, public, dict(clock.seconds), bytes_up, bytes_down)
    return replace(state, releases=releases, ledger=tuple(wasted)), preparation


def users_of(task: Task, prototype: str, present: Sequence[int]) -> Sequence[int]:
    """Return the clients of a prototype or, if none of them is present, all."""
    own = [client for client in present if task.prototype_of[client] == prototype]
    return own or present


def rehearsed_bytes(task: Task) -> int:
    """Return the size of the public examples that a client is given once, to rehearse them."""
    method = task.method
    sent = method.trains and method.exchange == "models" and "rehearsal" in objectives_of(task)
    return num_bytes({"one": task.distill_images[:1]}) * len(rehearsed_rows(task)) if sent else 0


def release_scores(
    task: Task,
    clients: Clients,
    chosen: Sequence[int],
    *,
    extractors: Mapping[str, Weights],
    public: Mapping[str, Public],
    section: Certainty | None = None,
) -> tuple[dict[int, ScoreRelease], list[LedgerEntry], int, int]:
    """Ask clients for releases; return usable ones by id, what others cost, and bytes down and up.

    Without a `section`, the method's. An unusable release causes a warning. The client is asked
    again when it is selected to train.
    """
    section = task.method.certainty(task.experiment.certainty) if section is None else section
    request = ReleaseRequest(extractors, public, section, task.seed)
    widths = {
        name: release_width(task, name, public[name], section)
        for name in {task.prototype_of[one] for one in chosen}
    }
    answers: dict[int, ScoreRelease] = {}
    wasted: list[LedgerEntry] = []
    bytes_up = 0
    for answer in clients.release_scores(chosen, request):
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
    return limits_of(mechanism, num_examples=max(1, num_examples), public=public)


def release_width(task: Task, prototype: str, public: Public, section: Certainty) -> int:
    """Return the length of a release, from one of two made-up examples."""

    def release() -> int:
        features = torch.zeros(2, build_models(task)[prototype].feature_width, device=task.device)
        labels = torch.zeros(2, dtype=torch.int64, device=task.device)
        noise = SimulatedNoise(seeding.generator(0, "width of a release"))
        mechanism = MECHANISMS[section.mechanism](section)
        made = release_of(mechanism, features, labels, dict(public), noise=noise)
        return len(made.vector)

    certainty = section.model_dump_json()
    shapes = str({key: tuple(tensor.shape) for key, tensor in sorted(public.items())})
    return task.compute.once(
        ("width of a release", task.architecture(prototype), certainty, shapes), release
    )


def mechanism_of(task: Task) -> Mechanism:
    """Return the mechanism of the method's releases."""
    section = task.method.certainty(task.experiment.certainty)
    return MECHANISMS[section.mechanism](section)


ClassEstimates = dict[str, tuple[list[int], ClassEstimate]]
"""By prototype: clients that have released class sums, and what these tell."""


def class_estimates(
    task: Task, releases: Mapping[int, ScoreRelease], public: Mapping[str, Public]
) -> ClassEstimates:
    """Return the clients of each prototype that have released class sums, and what these tell."""
    mechanism = mechanism_of(task)
    if not isinstance(mechanism, ClassSums):
        raise ValueError(
            f"method {task.method.name}: needs class sums; its mechanism should be classes"
        )
    found = {}
    for name, own in public.items():
        members = [client for client in sorted(releases) if task.prototype_of[client] == name]
        if members:
            vectors, sigmas = stacked(releases, members, device=task.device)
            found[name] = members, mechanism.estimate(vectors, sigmas, own)
    return found


def set_private_heads(
    task: Task,
    trained: Mapping[str, SplitModel],
    *,
    releases: Mapping[int, ScoreRelease],
    extractors: Mapping[str, Weights],
    public: Mapping[str, Public],
) -> None:
    """Fit the head of each prototype to the discriminant of its clients' class sums, on the distill
    set. A method that trains starts from it as far as clients hold few classes and it is
    reliable."""
    from fedaux.core.private_head import of_prototype, set_head, start_share  # late: seldom needed

    mechanism = mechanism_of(task)
    features = {
        name: extract(task, name, extractors[name], task.distill_images) for name in trained
    }
    linear = task.experiment.mode == "linear"
    logits, shares = {}, {}
    for name, (_, estimate) in class_estimates(task, releases, public).items():
        logits[name] = estimate.logits(mechanism.project(features[name], public[name]))
        share = start_share(estimate, linear=linear) if task.method.trains else 1.0
        shares[name] = torch.tensor(share)
    for name, model in trained.items():
        targets, share = of_prototype(logits, name), float(of_prototype(shares, name))
        set_head(model.head, features[name], targets, share=share, prototype=name)


def stacked(
    releases: Mapping[int, ScoreRelease], members: Sequence[int], *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return released vectors [K, D] and the sigmas of their noise [K]."""
    vectors = torch.stack([releases[client].vector for client in members])
    sigmas = torch.tensor([releases[client].entry.sigma for client in members])
    return vectors.to(device, torch.float64), sigmas.to(device, torch.float64)


class Scorer:
    """Certainty scores on the distill set, for the clients of one round at a time."""

    def __init__(self, task: Task, preparation: Preparation) -> None:
        self._task = task
        self._public = preparation.public
        self._mechanism = mechanism_of(task)
        self._estimated: tuple[Mapping[int, ScoreRelease], ClassEstimates] | None = None
        self._projected = {
            name: self.project(name, preparation.extractors[name], task.distill_images)
            for name in preparation.public
        }

    def project(self, prototype: str, extractor: Weights, images: Tensor) -> Tensor:
        """Return the projected features [N, k] of images under h0."""
        features = extract(self._task, prototype, extractor, images)
        return self._mechanism.project(features, self._public[prototype])

    def _estimates(self, releases: Mapping[int, ScoreRelease]) -> ClassEstimates:
        """Return what class sums tell; they are asked for several times with the same releases."""
        if self._estimated is None or self._estimated[0] is not releases:
            self._estimated = releases, class_estimates(self._task, releases, self._public)
        return self._estimated[1]

    def class_counts(self, releases: Mapping[int, ScoreRelease], chosen: Sequence[int]) -> Tensor:
        """Return the estimated numbers of examples per class of clients [K, C]."""
        estimates = self._estimates(releases)
        rows = {
            client: row
            for clients, estimate in estimates.values()
            for client, row in zip(clients, estimate.trusted_counts, strict=True)
        }
        return torch.stack([rows[client] for client in chosen])

    def concentration(self, releases: Mapping[int, ScoreRelease]) -> float:
        """Return how few classes a client holds, in 0 .. 1: mean over prototypes."""
        found = [estimate.concentration for _, estimate in self._estimates(releases).values()]
        return sum(found) / len(found)

    def class_prior(self, releases: Mapping[int, ScoreRelease]) -> Tensor:
        """Return the estimated class shares of all clients together [C]: mean over prototypes."""
        estimates = self._estimates(releases).values()
        return torch.stack([estimate.prior for _, estimate in estimates]).mean(dim=0)

    def private_beliefs(self, releases: Mapping[int, ScoreRelease]) -> tuple[Tensor, float]:
        """Return the private head's probabilities on the distill set [N, C], and how reliable the
        releases are, in 0 .. 1: means over prototypes."""
        estimates = self._estimates(releases)
        if not estimates:
            raise ValueError(f"method {self._task.method.name}: no client released class sums")
        logits = [one.logits(self._projected[name]) for name, (_, one) in estimates.items()]
        beliefs = torch.stack([own.softmax(dim=1) for own in logits]).mean(dim=0)
        reliability = [one.reliability for _, one in estimates.values()]
        return beliefs.float(), sum(reliability) / len(reliability)

    def log_scores(
        self,
        releases: Mapping[int, ScoreRelease],
        chosen: Sequence[int],
        projected: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return log s_i(x) [K, N] of clients, on the distill set or other projected features."""
        if not self._task.method.scores:
            raise ValueError(
                f"method {self._task.method.name}: its teacher {self._task.method.teacher} asks "
                "for certainty scores, "
                "and clients release none; scores should be True"
            )
        projected = self._projected if projected is None else projected
        rows: dict[int, Tensor] = {}
        for name, features in projected.items():
            # Mechanisms with labels pool what all clients have released.
            pool = sorted(releases) if takes_labels(self._mechanism) else chosen
            members = [client for client in pool if self._task.prototype_of[client] == name]
            if members:
                vectors, sigmas = stacked(releases, members, device=features.device)
                counts = [releases[client].entry.num_examples for client in members]
                scores = self._mechanism.log_scores(
                    vectors.to(features),
                    sigmas.to(features),
                    self._public[name],
                    features,
                    sizes=torch.tensor(counts).to(features),
                )
                rows |= dict(zip(members, scores, strict=True))
        return torch.stack([rows[client] for client in chosen])
