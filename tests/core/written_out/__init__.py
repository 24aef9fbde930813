"""FedAUX and its peers in eager PyTorch: the whole algorithm, client by client, batch by batch.

The test oracle: `prepare` is the paper's Algorithm 1, `play_round` its Algorithm 2. It covers the
methods in `written_out.methods.METHODS`, but not every setting: see `LEFT_OUT`.

The split of the data, the initial models and h0 are its inputs; single steps, such as a client's
training or an average, are in `written_out.parts`.

Shapes: K models, N public examples, C classes, F features, n examples of one client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux import seeding
from fedaux.config import ExperimentFields
from fedaux.core.objectives import (
    class_adjustment,
    local_loss,
    strength_of,
)
from fedaux.models import MODELS, SplitModel
from fedaux.privacy.classes import ClassSums
from fedaux.privacy.heads import layer_of
from fedaux.privacy.mechanisms import (
    MECHANISMS,
    Public,
    Release,
    SimulatedNoise,
)
from written_out.methods import Method, head_section
from written_out.parts import (
    STATISTICS,
    Weights,
    average,
    distill,
    extract_features,
    joined,
    minimise,
    predict,
    sample_models,
    snapshot,
    soft_labels,
    standardisation,
    teacher_weights,
    train_client,
)

HALF_MAX = torch.finfo(torch.float16).max
LEFT_OUT = (
    "aggregation",
    *("local.privacy", "local.optimizer_state", "federation.wire"),
    "distillation.steps",
    *("data.channel_mean", "data.channel_deviation", "data.mirror"),
)
"""Settings that must have their default values here."""
LEAST_TOLD = 0.01  # nats about the class in the first soft labels of fedaux2, else none are learned


@dataclass(frozen=True)
class Task:
    """One method and one seed: settings and data, on one device.

    Examples are uint8 images [., channels, height, width] or token ids [., L].
    """

    experiment: ExperimentFields
    method: Method
    seed: int
    input_shape: tuple[int, ...]
    num_classes: int
    prototype_of: Sequence[str]  # the model prototype of each client
    images: Tensor  # private examples of all clients
    labels: Tensor
    parts: Sequence[Tensor]  # the rows of `images` and `labels` that each client holds
    negatives: Tensor  # D-, public
    distill_set: Tensor  # public
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Preparation:
    """What Algorithm 1 leaves behind, by prototype. In linear mode, models are heads on features.

    Methods without scores have no releases, and nothing public or projected.
    """

    models: Mapping[str, SplitModel]
    images: Mapping[str, Tensor]  # the models' inputs: private ones,
    negatives: Mapping[str, Tensor]  # public ones,
    distill_set: Mapping[str, Tensor]  # public ones,
    test_images: Mapping[str, Tensor]  # and of the test data
    public: Mapping[str, Public]  # what the mechanism derives from the negatives
    projected: Mapping[str, Tensor]  # the distill set as the mechanism scores it [N, .]
    releases: Mapping[int, Release]  # by client


@dataclass(frozen=True)
class Member:
    """The answer of a client, given in this round or remembered from an earlier one (`+m`)."""

    client: int
    prototype: str
    round: int
    size: float  # its weight in averages: r_i |D_i|
    weights: Weights  # empty if only predictions are remembered
    logits: Tensor | None = None  # f_i(x) on the distill set [N, C]; None if it does not teach
    share: float = 1.0  # r_i: below 1 for a discounted memory
    control: Weights = field(default_factory=dict)  # g_i of SCAFFOLD and FedDyn, from its update


@dataclass(frozen=True)
class State:
    """What the server carries from round to round."""

    round: int
    weights: Mapping[str, Weights]  # the server model of each prototype
    memory: Mapping[int, Member] = field(default_factory=dict)
    smoothed: Mapping[str, Weights] = field(default_factory=dict)  # the models' mean over rounds
    told: float = math.inf  # what the first labels of fedaux2 tell of the class, in nats


# Algorithm 1: preparation.


def prepare(task: Task, *, extractors: Mapping[str, Weights]) -> tuple[Preparation, State]:
    """Start from h0, publish the mechanism's map, let each client release its vector once.

    `extractors` holds the pretrained h0 of each prototype; a start from scratch ignores it.
    """
    require_covered(task.experiment)
    models = build_models(task)
    if task.method.from_h0:
        for name, model in models.items():
            model.features.load_state_dict(extractors[name])

    h0 = {name: snapshot(model.features) for name, model in models.items()}

    def own_features(name: str, images: Tensor) -> Tensor:
        values = extract_features(models[name], h0[name], images)
        return maps[name](values) if name in maps else values

    def features(images: Tensor) -> dict[str, Tensor]:
        return {name: own_features(name, images) for name in models}

    maps: dict[str, Callable[[Tensor], Tensor]] = {}
    if task.experiment.mode == "linear":
        found = [features(own) for own in (task.negatives, task.distill_set)]
        maps = {name: standardisation(torch.cat([own[name] for own in found])) for name in models}
    public: dict[str, Public] = {}
    projected: dict[str, Tensor] = {}
    releases: dict[int, Release] = {}
    if task.method.scores_first:
        mechanism = mechanism_of(task)
        by_class = isinstance(mechanism, ClassSums)
        used = [task.negatives, task.distill_set] if by_class else [task.negatives]
        for name, negative in features(torch.cat(used)).items():
            clients = [one for one in clients_with_data(task) if task.prototype_of[one] == name]
            sizes = [len(task.parts[client]) for client in clients]
            public[name] = mechanism.publish(negative, num_classes=task.num_classes, sizes=sizes)
        for name, own in features(task.distill_set).items():
            projected[name] = mechanism.project(own, public[name])
        for client in clients_with_data(task):
            name = task.prototype_of[client]
            rows = task.parts[client]
            own = own_features(name, task.images[rows])
            noise = SimulatedNoise(seeding.generator(task.seed, "certainty noise", client=client))
            releases[client] = mechanism.release(
                own, public[name], noise=noise, labels=task.labels[rows]
            )
    if task.method.start == "private-head":
        for name, own in features(task.distill_set).items():
            estimate = class_estimate(task, releases, public[name], name)
            share = 0.5 * estimate.reliability if task.method.trains else 1.0
            fit_head(models[name], own, estimate.logits(projected[name]), share=share)
    images, negatives, distill_set, test_images = (
        features(own) if task.experiment.mode == "linear" else dict.fromkeys(models, own)
        for own in (task.images, task.negatives, task.distill_set, task.test_images)
    )
    seen = [features(own) for own in (task.images, task.negatives) if task.method.heads]
    if task.experiment.mode == "linear":
        for model in models.values():
            model.features = nn.Identity()
    prepared = Preparation(
        models, images, negatives, distill_set, test_images, public, projected, releases
    )
    heads = release_heads(task, prepared, *seen) if task.method.heads else []
    weights = {name: snapshot(model) for name, model in models.items()}
    return prepared, State(0, weights | average_by_prototype(heads), by_client(heads))


def release_heads(
    task: Task,
    preparation: Preparation,
    features: Mapping[str, Tensor],
    negatives: Mapping[str, Tensor],
) -> list[Member]:
    """Return each client's noisy head on h0, with its logits: it teaches in every round."""
    section = head_section(task.experiment.certainty)
    mechanism: Any = MECHANISMS[section.mechanism](section)
    members = []
    for client in clients_with_data(task):
        name, rows = task.prototype_of[client], task.parts[client]
        public = mechanism.publish(negatives[name], num_classes=task.num_classes)
        stream = seeding.generator(task.seed, "certainty noise", client=client, part="heads")
        noise = SimulatedNoise(stream)
        own = mechanism.release(features[name][rows], public, noise=noise, labels=task.labels[rows])
        head = dict(zip(("head.weight", "head.bias"), layer_of(own.vector, public), strict=True))
        weights = snapshot(preparation.models[name]) | head
        members.append(with_logits(preparation, Member(client, name, 0, len(rows), weights)))
    return members


def build_models(task: Task) -> dict[str, SplitModel]:
    """Return each prototype's model f = head after features, with random initial weights."""
    models = {}
    for prototype in task.experiment.prototypes:
        with seeding.initialisation(task.seed, part=prototype.name):
            build = MODELS[prototype.model]
            model = build(task.input_shape, task.num_classes, **prototype.options)
        models[prototype.name] = model.to(task.images.device)
    return models


def clients_with_data(task: Task) -> list[int]:
    """Return the clients that hold examples, in ascending order."""
    return [client for client, part in enumerate(task.parts) if len(part) > 0]


def mechanism_of(task: Task) -> Any:
    """Return the mechanism of the method's releases."""
    section = task.method.certainty(task.experiment.certainty)
    return MECHANISMS[section.mechanism](section)


def class_estimate(
    task: Task, releases: Mapping[int, Release], public: Public, prototype: str
) -> Any:
    """Return what the class sums of a prototype's clients tell about the classes."""
    own = [release for one, release in releases.items() if task.prototype_of[one] == prototype]
    vectors = torch.stack([release.vector for release in own])
    sigmas = torch.tensor([release.sigma for release in own]).to(vectors)
    return mechanism_of(task).estimate(vectors, sigmas, public)


def fit_head(model: SplitModel, features: Tensor, targets: Tensor, *, share: float) -> None:
    """Move the linear head by a share of the way to argmin mean_x |W h(x) + b - f0(x)|^2 + r |W|^2.

    r is a thousandth of the mean variance of a feature; its rows are appended to the data of a
    least-squares problem.
    """
    inputs, outputs = features.double(), targets.double()
    centre, level = inputs.mean(dim=0), outputs.mean(dim=0)
    penalty = (1e-3 * (inputs - centre).square().mean() * len(inputs)).sqrt()
    rows = torch.cat([inputs - centre, penalty * torch.eye(inputs.shape[1]).to(inputs)])
    wanted = torch.cat([outputs - level, torch.zeros(inputs.shape[1], outputs.shape[1]).to(inputs)])
    weight = torch.linalg.lstsq(rows, wanted).solution.T
    fitted = {"weight": weight, "bias": level - weight @ centre}
    before = model.head.state_dict()
    model.head.load_state_dict(
        {name: before[name] + share * (own - before[name]) for name, own in fitted.items()}
    )


def log_scores(task: Task, preparation: Preparation, clients: Sequence[int]) -> Tensor:
    """Return log s_i(x) [K, N] of K clients on the distill set, each under its own h0 (Eq. 6).

    Mechanisms with labels pool the releases of all clients.
    """
    mechanism = mechanism_of(task)
    pool = sorted(preparation.releases) if mechanism.scores == "together" else clients
    scores: dict[int, Tensor] = {}
    for name, projected in preparation.projected.items():
        own = [client for client in pool if task.prototype_of[client] == name]
        releases = [preparation.releases[client] for client in own]
        if own:
            vectors = torch.stack([release.vector for release in releases])
            sigmas = torch.tensor([release.sigma for release in releases]).to(projected)
            sizes = torch.tensor([len(task.parts[client]) for client in own]).to(projected)
            rows = mechanism.log_scores(
                vectors, sigmas, preparation.public[name], projected, sizes=sizes
            )
            scores |= dict(zip(own, rows, strict=True))
    return torch.stack([scores[client] for client in clients])


def belief_scores(
    task: Task, preparation: Preparation, members: Sequence[Member], beliefs: Tensor
) -> Tensor:
    """Return sum_c q(c | x) P(i | c) [K, N], without the factor r_i that `teacher_weights` adds."""
    held = class_shares(task, preparation, members)
    shares = torch.tensor([member.share for member in members]).to(held)[:, None]
    return (held / shares) @ beliefs.to(held).T


def class_shares(task: Task, preparation: Preparation, members: Sequence[Member]) -> Tensor:
    """Return P(i | c) = r_i n_ic / sum_j r_j n_jc of members [K, C]."""
    counts: dict[int, Tensor] = {}
    for name, public in preparation.public.items():
        own = [client for client in preparation.releases if task.prototype_of[client] == name]
        estimate = class_estimate(task, preparation.releases, public, name)
        counts |= dict(zip(own, estimate.counts, strict=True))
    held = torch.stack([counts[member.client] for member in members])
    shares = torch.tensor([member.share for member in members]).to(held)[:, None]
    held = (shares * held).clamp_min(1e-9)
    return held / held.sum(dim=0)


def joint_share(task: Task) -> float:
    """Return how much rehearsed examples count in the class shares that clients train on: as their
    own where heads are trained; in networks by K steps per round at most 2.5 / K of all."""
    local, sizes = task.experiment.local, [len(part) for part in task.parts if len(part) > 0]
    steps = local.epochs * math.ceil(float(np.mean(sizes)) / local.batch_size)
    if task.experiment.mode == "linear" or steps <= 5:
        return 1.0
    return 2.5 / (steps - 2.5)


# Algorithm 2: training.


def run(task: Task, *, extractors: Mapping[str, Weights]) -> tuple[State, list[dict[str, Any]]]:
    """Prepare and play all rounds; return the last state and the metrics of each round."""
    preparation, state = prepare(task, extractors=extractors)
    rows = []
    for _ in range(task.experiment.rounds):
        state, row = play_round(task, preparation, state)
        rows.append(row)
    return state, rows


def play_round(
    task: Task,
    preparation: Preparation,
    state: State,
    *,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> tuple[State, dict[str, Any]]:
    """Select, train, average, teach, distill, evaluate; each inside `phase(name)`, for timing."""
    if task.method.head_by_class and task.method.correction == "scaffold" and state.memory:
        # Measured gradients replace what the releases tell.
        task = replace(task, method=replace(task.method, objectives=(), head_by_class=False))
    method, number = task.method, state.round + 1
    chosen, beliefs = select(task, number), None
    if "rehearsal" in objectives_of(task) or method.teacher in ("belief", "private-head"):
        with phase("beliefs"):
            beliefs = server_beliefs(task, preparation, state)
    with phase("train"):
        present = [train_member(task, preparation, state, client, beliefs) for client in chosen]
    absent = absent_members(task, state, chosen)
    weights, told = dict(state.weights), state.told
    if method.exchange != "nothing" and method.trains:
        with phase("average"):
            averages = average_by_prototype([*present, *absent])
            for name, own in averages.items():
                if method.head_by_class:
                    members = by_prototype([*present, *absent])[name]
                    shares = class_shares(task, preparation, members)
                    own |= head_by_class(members, shares, before=state.weights[name])
                rate = method.server_rate
                if method.correction == "scaffold":  # control variates of absent clients are old
                    rate = 1.0 + (rate - 1.0) * task.experiment.participation_rate
                weights[name] = step(state.weights[name], own, rate)
                if method.correction == "feddyn":  # theta = mean_i theta_i - g / alpha
                    mean = mean_control(task, {**state.memory, **by_client(present)}, name)
                    for key, tensor in mean.items():
                        weights[name][key] = own[key] - tensor / task.experiment.local.proximal
    if method.teacher is not None:
        with phase("teach"):
            present = [with_logits(preparation, member) for member in present]
            targets = teach(task, preparation, [*present, *absent], number, beliefs)
        if method.teacher == "belief" and math.isinf(told):
            told = information(targets)
        with phase("distill"):
            for name, model in preparation.models.items() if told >= LEAST_TOLD else ():
                weights[name] = distill(
                    model,
                    weights[name],
                    preparation.distill_set[name],
                    targets,
                    section=task.experiment.distillation,
                    generator=seeding.generator(task.seed, "distillation", round=number, part=name),
                )
    smoothed = smooth(method, state, weights, number)
    if method.calibrated and number == task.experiment.rounds:
        smoothed = {
            name: calibrate(task, preparation, weights[name], name) for name in preparation.models
        }
    models = [*(smoothed or weights).items()]
    if method.exchange == "nothing":  # the clients' own models count, not the server's
        models = [(member.prototype, member.weights) for member in (*present, *absent)]
    with phase("evaluate"):
        measured = evaluate(task, preparation, models)
    remembers = method.remembers and told >= LEAST_TOLD
    kept = [remembered(member, method) for member in present if remembers]
    row = {"round": number, "clients": chosen, **measured}
    return State(number, weights, {**state.memory, **by_client(kept)}, smoothed, told), row


def select(task: Task, number: int) -> list[int]:
    """Return S_t: a random share C of the population, at least one client, in ascending order.

    Nobody, if the method does not train.
    """
    if not task.method.trains:
        return []
    count = max(1, round(task.experiment.participation_rate * len(task.parts)))
    generator = seeding.generator(task.seed, "selection", round=number)
    return sorted(generator.permutation(clients_with_data(task))[:count].tolist())


def objectives_of(task: Task) -> tuple[str, ...]:
    """Return what clients minimise besides cross-entropy."""
    return tuple(dict.fromkeys((*task.method.objectives, *task.experiment.local.objectives)))


def server_beliefs(task: Task, preparation: Preparation, state: State) -> tuple[Tensor, float]:
    """Return q(c | x) of the server on the distill set [N, C], and the releases' reliability rho.

    q is the mean of the server models' probabilities. With class sums, a share of anchor * rho /
    round is the private head's. Without, rho is 1.
    """
    logits = [
        predict(model, state.weights[name], preparation.distill_set[name])
        for name, model in preparation.models.items()
    ]
    beliefs = torch.stack(logits).softmax(dim=2).mean(dim=0)
    if task.method.mechanism != "classes":
        return beliefs, 1.0
    estimates = {
        name: class_estimate(task, preparation.releases, public, name)
        for name, public in preparation.public.items()
    }
    reliability = float(np.mean([own.reliability for own in estimates.values()]))
    heads = [own.logits(preparation.projected[name]) for name, own in estimates.items()]
    private = torch.stack(heads).softmax(dim=2).mean(dim=0).float()
    fixed = task.method.teacher == "private-head"
    share = 1.0 if fixed else task.method.anchor * reliability / (state.round + 1)
    return (1 - share) * beliefs + share * private, reliability


def step(before: Weights, after: Weights, rate: float) -> Weights:
    """Return before + rate * (after - before); statistics and counters are `after`'s."""
    return {
        name: own
        if name.rpartition(".")[2] in STATISTICS or rate == 1
        else before[name] + rate * (own - before[name])
        for name, own in after.items()
    }


def smooth(
    method: Method, state: State, weights: Mapping[str, Weights], number: int
) -> Mapping[str, Weights]:
    """Return the mean over rounds of the middle between two rounds' server models, with decay
    smoothing * min(1, t / 30)."""
    if method.smoothing == 0 or not state.smoothed:
        return weights if method.smoothing else {}
    decay = method.smoothing * min(1, number / 30)
    return {
        prototype: {
            name: decay * state.smoothed[prototype][name]
            + (1 - decay) * (state.weights[prototype][name] + tensor) / 2
            if tensor.is_floating_point()
            else tensor
            for name, tensor in own.items()
        }
        for prototype, own in weights.items()
    }


def calibrate(task: Task, preparation: Preparation, weights: Weights, prototype: str) -> Weights:
    """Return weights whose head was trained on virtual features of all classes (CCVR).

    Clients release class sums under the trained features. Features of class c are drawn from
    N(mu_c, Sigma) with the covariance of the negatives, 1000 per class on average.
    """
    model, mechanism = preparation.models[prototype], mechanism_of(task)
    clients = [one for one in clients_with_data(task) if task.prototype_of[one] == prototype]
    trained = {
        key.removeprefix("features."): own
        for key, own in weights.items()
        if key.startswith("features.")
    }

    def features(images: Tensor) -> Tensor:
        return extract_features(model, trained, images)

    negatives = features(preparation.negatives[prototype])
    sizes = [len(task.parts[client]) for client in clients]
    every = features(
        torch.cat([preparation.negatives[prototype], preparation.distill_set[prototype]])
    )
    public = mechanism.publish(every, num_classes=task.num_classes, sizes=sizes)
    releases = {}
    for client in clients:
        rows = task.parts[client]
        noise = SimulatedNoise(seeding.generator(task.seed, "certainty noise", client=client))
        own = features(preparation.images[prototype][rows])
        releases[client] = mechanism.release(own, public, noise=noise, labels=task.labels[rows])
    estimate = class_estimate(task, releases, public, prototype)
    generator = seeding.generator(task.seed, "virtual features", part=prototype)
    back = torch.linalg.pinv(public["whitening"].double())  # from whitened features to h
    covariance = torch.cov(negatives.double().T, correction=0)
    variances, directions = torch.linalg.eigh(covariance)
    root = directions @ variances.clamp_min(0).sqrt().diag() @ directions.T
    means, labels = [], []
    for label, prior in enumerate(estimate.prior):
        whitened = public["bound"].double() * (estimate.centre + estimate.shifts[label])
        for _ in range(max(1, round(1000 * task.num_classes * float(prior)))):
            means.append(public["centre"].double() + whitened @ back)
            labels.append(label)
    noise_MF = torch.from_numpy(generator.standard_normal((len(labels), len(root)))).to(root)
    virtual = (torch.stack(means) + noise_MF @ root).float()
    targets = torch.tensor(labels).to(task.labels)
    head = SplitModel(nn.Identity(), model.head, feature_width=model.feature_width)
    start = {key: weights[key] for key in head.state_dict()}
    section = task.experiment.local
    return weights | minimise(
        functional.cross_entropy, head, start, virtual, targets, section, generator
    )


def train_member(
    task: Task,
    preparation: Preparation,
    state: State,
    client: int,
    beliefs: tuple[Tensor, float] | None,
) -> Member:
    """Train one client from the server's model of its prototype or, alone, from its own."""
    name, rows, number = task.prototype_of[client], task.parts[client], state.round + 1
    alone = task.method.exchange == "nothing" and client in state.memory
    experiment, objectives = task.experiment, objectives_of(task)
    local, inputs, rehearsed, soft = experiment.local, preparation.images[name][rows], 0, None
    if beliefs is not None:
        strengths = {"jointly-adjusted": joint_share(task), **local.strengths}
        local = local.model_copy(update={"strengths": strengths})
    if beliefs is not None and "rehearsal" in objectives:
        # Public examples with the server's soft labels, in half precision.
        probabilities, _ = beliefs
        size = len(probabilities)
        order = seeding.generator(task.seed, "rehearsal").permutation(size)
        public = np.sort(order[: experiment.rehearsal.examples or size])
        strength = strength_of("rehearsal", local)
        soft = (strength * probabilities[public]).half().float()
        inputs = joined(inputs, preparation.distill_set[name][public])
        rehearsed = experiment.rehearsal.batch_size
    correction: Weights = {}
    if task.method.correction is not None:  # SCAFFOLD adds g - g_i, FedDyn -g_i
        mean, own = mean_control(task, state.memory, name), control_of(task, state.memory, client)
        sign = 1 if task.method.correction == "scaffold" else 0
        correction = {key: sign * mean[key] - own[key] for key in mean}
    weights = train_client(
        preparation.models[name],
        state.memory[client].weights if alone else state.weights[name],
        inputs,
        task.labels[rows],
        section=local,
        proximal=local.proximal if "proximal" in objectives else 0.0,
        generator=seeding.generator(task.seed, "local", round=number, client=client),
        loss=local_loss(objectives, local, rehearsed=rehearsed),
        adjustment=class_adjustment(
            objectives, local, task.labels[rows], num_classes=task.num_classes
        ),
        beliefs=soft,
        correction=correction,
    )
    member = Member(client, name, number, len(rows), weights)
    if task.method.correction is None:
        return member
    moved = {key: weights[key] - state.weights[name][key] for key in correction}
    local = experiment.local
    if task.method.correction == "scaffold":  # option II, with K local steps
        scale = local.learning_rate * local.epochs * math.ceil(len(rows) / local.batch_size)
        control = {key: -correction[key] - tensor / scale for key, tensor in moved.items()}
    else:
        control = {key: -correction[key] - local.proximal * moved[key] for key in moved}
    equal = not task.method.corrects_heads  # both papers average clients equally
    return replace(member, size=1 if equal else member.size, control=control)


def control_of(task: Task, memory: Mapping[int, Member], client: int) -> Weights:
    """Return the control variate g_i of a client, zero before it has trained."""
    if client in memory:
        return memory[client].control
    model = build_models(task)[task.prototype_of[client]]
    return {
        key: torch.zeros_like(own)
        for key, own in model.named_parameters()
        if task.experiment.mode == "full" or key.startswith("head.")
    }


def mean_control(task: Task, memory: Mapping[int, Member], prototype: str) -> Weights:
    """Return g, the mean of g_i over the prototype's clients with data."""
    clients = [one for one in clients_with_data(task) if task.prototype_of[one] == prototype]
    controls = [control_of(task, memory, client) for client in clients]
    return average(controls, sizes=[1] * len(controls))


def by_client(members: Sequence[Member]) -> dict[int, Member]:
    """Return members by client."""
    return {member.client: member for member in members}


def with_logits(preparation: Preparation, member: Member) -> Member:
    """Return a member with its logits on the distill set [N, C]."""
    name = member.prototype
    inputs = preparation.distill_set[name]
    return replace(member, logits=predict(preparation.models[name], member.weights, inputs))


def remembered(member: Member, method: Method) -> Member:
    """Return what a method with a memory keeps of an answer; predictions in half precision."""
    weights, logits = member.weights if "weights" in method.memory else {}, None
    if member.logits is not None and "predictions" in method.memory:
        logits = member.logits.clamp(-HALF_MAX, HALF_MAX).half()
    return replace(member, weights=weights, logits=logits)


def absent_members(task: Task, state: State, chosen: Sequence[int]) -> list[Member]:
    """Return the remembered clients that do not take part, with shares r_i = discount^age."""
    absent = []
    for member in state.memory.values():
        share = task.experiment.memory.discount ** (state.round + 1 - member.round)
        if member.client not in chosen:
            absent.append(replace(member, share=share, size=share * member.size))
    return absent


def by_prototype(members: Sequence[Member]) -> dict[str, list[Member]]:
    """Return the members whose weights are known, by prototype."""
    known = [member for member in members if member.weights]
    names = sorted({member.prototype for member in known})
    return {name: [member for member in known if member.prototype == name] for name in names}


def average_by_prototype(members: Sequence[Member]) -> dict[str, Weights]:
    """Return sum_i r_i |D_i| theta_i / sum_l r_l |D_l| over each prototype's members."""
    return {
        name: average([one.weights for one in own], sizes=[one.size for one in own])
        for name, own in by_prototype(members).items()
    }


def head_by_class(members: Sequence[Member], shares: Tensor, *, before: Weights) -> Weights:
    """Return the head whose row c is sum_i P(i | c) theta_i[c], from P(i | c) [K, C]; each head is
    moved to the mean row of the server's first, which changes no prediction."""
    head: Weights = {}
    for name in ("head.weight", "head.bias"):
        head[name] = torch.zeros_like(before[name])
        for member, own in zip(members, shares.to(before[name]), strict=True):
            rows = member.weights[name]
            rows = rows - rows.mean(dim=0) + before[name].mean(dim=0)
            head[name] += (own[:, None] if rows.ndim == 2 else own) * rows
    return head


def teach(
    task: Task,
    preparation: Preparation,
    members: Sequence[Member],
    number: int,
    beliefs: tuple[Tensor, float] | None = None,
) -> Tensor:
    """Return the teacher's soft labels [N, C], from the members that have logits.

    FedBE's teacher adds, for each prototype, the members' average and models sampled around it.
    """
    teacher = task.method.teacher
    if teacher == "private-head" and beliefs is not None:
        return beliefs[0]
    members = [member for member in members if member.logits is not None]
    members = sorted(members, key=attrgetter("client"))
    scores = None
    if teacher in ("certainty", "mixture"):
        scores = log_scores(task, preparation, [member.client for member in members])
    if teacher == "belief" and beliefs is not None:
        scores = belief_scores(task, preparation, members, beliefs[0]).log()
    if teacher == "bayesian":
        section = task.experiment.bayesian
        generator = seeding.generator(task.seed, "bayesian", round=number)
        sampled = []
        for name, own in by_prototype(members).items():
            weights, sizes = [one.weights for one in own], [one.size for one in own]
            models = sample_models(weights, sizes=sizes, section=section, generator=generator)
            for model in (average(weights, sizes=sizes), *models):
                sampled.append(with_logits(preparation, Member(-1, name, number, 0, model)))
        members = [*members, *sampled] if section.include_clients else sampled
    logits = torch.stack([member.logits.float() for member in members if member.logits is not None])
    shares = torch.tensor([member.share for member in members], device=logits.device)
    of_probabilities = teacher in ("probabilities", "mixture", "bayesian", "belief")
    if not of_probabilities and teacher not in ("mean", "certainty"):
        raise ValueError(
            f"teacher {teacher}: not part of the algorithm written out; use fedaux.run"
        )
    weights_KN = teacher_weights(shares, log_scores=scores)
    labels = soft_labels(logits, weights_KN, of_probabilities=of_probabilities)
    return balanced(task, preparation, labels) if teacher == "belief" else labels


def balanced(task: Task, preparation: Preparation, labels: Tensor) -> Tensor:
    """Return soft labels [N, C] with class shares moved towards the clients' by t = 1 - 4 I / log C
    of the way, in logarithms, if that is positive; I is the labels' information."""
    priors = [
        class_estimate(task, preparation.releases, public, name).prior
        for name, public in preparation.public.items()
    ]
    prior = torch.stack(priors).mean(dim=0).to(labels)
    shares = labels.mean(dim=0).clamp_min(1e-12)
    strength = max(0.0, 1 - 4 * information(labels) / math.log(labels.shape[1]))
    return (labels.log() + strength * (prior.log() - shares.log())).softmax(dim=1)


def information(labels: Tensor) -> float:
    """Return what soft labels [N, C] tell about the class, in nats."""
    entropy = torch.special.entr(labels).sum(dim=1).mean()
    return float(torch.special.entr(labels.mean(dim=0)).sum() - entropy)


def evaluate(
    task: Task, preparation: Preparation, models: Sequence[tuple[str, Weights]]
) -> dict[str, Any]:
    """Return accuracy and cross-entropy on the test data, means over models of prototypes."""
    accuracies: dict[str, list[float]] = {}
    losses = []
    for name, weights in models:
        logits = predict(preparation.models[name], weights, preparation.test_images[name])
        accuracy = float((logits.argmax(dim=1) == task.test_labels).double().mean())
        accuracies.setdefault(name, []).append(accuracy)
        losses.append(float(functional.cross_entropy(logits, task.test_labels)))
    every = [accuracy for own in accuracies.values() for accuracy in own]
    return {
        "accuracy": float(np.mean(every)),
        "loss": float(np.mean(losses)),
        "accuracy_by_prototype": {name: float(np.mean(own)) for name, own in accuracies.items()},
    }


def require_covered(experiment: ExperimentFields) -> None:
    """Raise ValueError for settings that are left out of this file."""
    values, defaults = attrgetter(*LEFT_OUT)(experiment), attrgetter(*LEFT_OUT)(ExperimentFields())
    triples = zip(LEFT_OUT, values, defaults, strict=True)
    if found := [name for name, value, default in triples if value != default]:
        raise ValueError(
            f"{', '.join(found)}: not part of the algorithm written out; use fedaux.run"
        )
