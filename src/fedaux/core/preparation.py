"""The preparation phase (Algorithm 1): h0, the clients' releases, and their scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedaux import seeding
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
    trained_models,
)
from fedaux.core.weights import snapshot
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import SimulatedNoise
from fedaux.privacy.mechanisms import MECHANISMS, Public

if TYPE_CHECKING:
    from fedaux.models import SplitModel


def prepare(
    task: Task,
    clients: Clients,
    *,
    extractor: Callable[[str, SplitModel], Weights],
    callback: Callback,
    settle: Callable[[dict[str, Public]], dict[str, Public]] = dict,
) -> tuple[State, Preparation]:
    """Run the preparation phase (Algorithm 1). `extractor(prototype, model)` returns the pretrained
    h0.

    `settle` may return the public map of an interrupted attempt instead of the new one. On a GPU
    they can differ in the last bit, and clients would pay again for a release under the new map.
    """
    clock = Clock(task, 0, callback)
    models, trained = build_models(task), trained_models(task)
    extractors: dict[str, Weights] = {}
    public: dict[str, Public] = {}
    releases: dict[int, ScoreRelease] = {}
    wasted: list[LedgerEntry] = []
    bytes_up = bytes_down = 0
    if task.method.start == "pretrained":
        with clock.phase("pretrain"):
            for name, model in models.items():
                model.features.load_state_dict(extractor(name, model))
                if task.experiment.mode == "full":
                    trained[name].features.load_state_dict(model.features.state_dict())
    linear = task.experiment.mode == "linear"
    if task.method.scores or linear:
        extractors = {name: snapshot(model.features) for name, model in models.items()}
    present = clients.present()
    if task.method.scores:
        with clock.phase("certify"):
            mechanism = MECHANISMS[task.experiment.certainty.mechanism](task.experiment.certainty)
            for name in models:
                public[name] = mechanism.publish(
                    extract(task, name, extractors[name], task.negatives)
                )
            public = settle(public)
            releases, wasted, bytes_down, bytes_up = release_scores(
                task, clients, present, extractors=extractors, public=public
            )
    elif linear:  # clients that release scores have received h0 already
        bytes_down = sum(num_bytes(extractors[task.prototype_of[client]]) for client in present)
    state = State(round=0, weights={name: snapshot(model) for name, model in trained.items()})
    preparation = Preparation(extractors, public, dict(clock.seconds), bytes_up, bytes_down)
    return replace(state, releases=releases, ledger=tuple(wasted)), preparation


def release_scores(
    task: Task,
    clients: Clients,
    chosen: Sequence[int],
    *,
    extractors: Mapping[str, Weights],
    public: Mapping[str, Public],
) -> tuple[dict[int, ScoreRelease], list[LedgerEntry], int, int]:
    """Ask clients for releases; return usable ones by id, what others cost, and bytes down and up.

    An unusable release causes a warning. The client is asked again when it is selected to train.
    """
    request = ReleaseRequest(extractors, public, task.experiment.certainty, task.seed)
    widths = {
        name: release_width(task, name, public[name])
        for name in {task.prototype_of[one] for one in chosen}
    }
    answers: dict[int, ScoreRelease] = {}
    wasted: list[LedgerEntry] = []
    bytes_up = 0
    for answer in clients.release_scores(chosen, request):
        if answer.client not in chosen:
            continue
        bytes_up += answer.num_bytes()
        problem = problem_of_release(answer.vector, width=widths[task.prototype_of[answer.client]])
        if problem is None:
            answers[answer.client] = answer
        else:
            wasted.append(answer.entry)  # even an unusable release has left the client
            warnings.warn(f"client {answer.client}: {problem}; it is left out", stacklevel=2)
    bytes_down = sum(request.num_bytes(task.prototype_of[client]) for client in chosen)
    return dict(sorted(answers.items())), wasted, bytes_down, bytes_up


def release_width(task: Task, prototype: str, public: Public) -> int:
    """Return the length of a release, from one of two made-up examples."""

    def release() -> int:
        mechanism = MECHANISMS[task.experiment.certainty.mechanism](task.experiment.certainty)
        features = torch.zeros(2, build_models(task)[prototype].feature_width, device=task.device)
        noise = SimulatedNoise(seeding.generator(0, "width of a release"))
        return len(mechanism.release(features, dict(public), noise=noise).vector)

    certainty = task.experiment.certainty.model_dump_json()
    return task.compute.once(
        ("width of a release", task.architecture(prototype), certainty), release
    )


class Scorer:
    """Certainty scores on the distill set, for the clients of one round at a time."""

    def __init__(self, task: Task, preparation: Preparation) -> None:
        self._task = task
        self._public = preparation.public
        self._mechanism = MECHANISMS[task.experiment.certainty.mechanism](task.experiment.certainty)
        self._projected = {
            name: self.project(name, preparation.extractors[name], task.distill_images)
            for name in preparation.public
        }

    def project(self, prototype: str, extractor: Weights, images: Tensor) -> Tensor:
        """Return the projected features [N, k] of images under h0."""
        features = extract(self._task, prototype, extractor, images)
        return self._mechanism.project(features, self._public[prototype])

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
            members = [client for client in chosen if self._task.prototype_of[client] == name]
            if members:
                vectors = torch.stack([releases[client].vector for client in members]).to(features)
                entries = [releases[client].entry for client in members]
                scores = self._mechanism.log_scores(
                    vectors,
                    torch.tensor([entry.sigma for entry in entries]).to(features),
                    self._public[name],
                    features,
                    sizes=torch.tensor([entry.num_examples for entry in entries]).to(features),
                )
                rows |= dict(zip(members, scores, strict=True))
        return torch.stack([rows[client] for client in chosen])
