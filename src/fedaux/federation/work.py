"""A node's work: load its own examples, check its policy, release or train, and record it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Data, Engine, Local
from fedaux.core.client import BLANK, Client, release_stream
from fedaux.core.compute import Compute, choose_device, compute_for
from fedaux.core.dpsgd import check_ready, refusal_of, update_entry
from fedaux.core.messages import ClientRelease, Update, Weights
from fedaux.core.plain_backend import PlainBackend, PlainPredictor
from fedaux.core.task import head_alone
from fedaux.core.weights import below, flat
from fedaux.data import (
    SOURCES,
    LabelledData,
    count_rows,
    load_labelled,
    load_rows,
    split_dirichlet,
)
from fedaux.data.features import feature_width
from fedaux.encoders import Encoder, Extractor, of_file
from fedaux.federation.node import NodeConfig
from fedaux.federation.plan import check_plan
from fedaux.federation.policy import Guard, Refusal, digest_of
from fedaux.federation.rehearsal import Received, check_batches, public_images, rehearsal_of
from fedaux.federation.terms import PrepareTerms, Terms, TrainTerms
from fedaux.models import MODELS, SplitModel, model_input, model_options
from fedaux.models.standardised import standardised
from fedaux.privacy.exact_gaussian import Draws, SecureDraws, SimulatedDraws
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Noise, Public
from fedaux.privacy.mechanisms import (
    MECHANISMS,
    UNPROTECTED_MECHANISMS,
)
from fedaux.privacy.secure import noise_for

Content = TypeVar("Content", ClientRelease, Update)


@dataclass(frozen=True)
class Answer(Generic[Content]):
    """A release or an update that may leave."""

    content: Content
    request: str
    """Digest of the request."""
    repeated: bool
    """Whether it was stored before and is sent again, at no cost."""


def prepare(
    config: NodeConfig, guard: Guard, terms: PrepareTerms, extractor: Weights, public: Public
) -> Answer[ClientRelease]:
    """Release certainty for h0 and the public map, within the node's policy; repeats return the
    stored release."""
    if terms.certainty not in terms.plan.certainty:
        raise Refusal("certainty: not the settings in the plan of this run")
    guard.check_release(terms.certainty)  # before any work is done for it
    check_declared(config, terms)
    examples = own_examples(config, terms.classes)
    check_map(config, terms, public, num_examples=len(examples.labels))
    check_whole(config, guard, terms, num_examples=len(examples.labels))
    about = {
        "certainty",
        "prototype",
        "image_shape",
        "classes",
        "channel_mean",
        "channel_deviation",
    }
    reads = MECHANISMS[terms.certainty.mechanism](terms.certainty).reads_features
    read = extractor if reads else {}  # what does not depend on h0 is not paid for again
    key = digest_of(terms.model_dump_json(include=about) + config.privacy.noise, read, public)
    if terms.mode == "linear" and extractor:
        guard.keep_received("extractor", extractor)
    if (stored := guard.stored_release(key)) is not None:
        return Answer(ClientRelease(config.number, *stored), key, repeated=True)
    alone = config.privacy.noise == "secure"
    compute = compute_of(config, terms, alone=alone)
    if terms.certainty.mechanism in UNPROTECTED_MECHANISMS:
        examples = examples.without_blanks()
    model = built(terms, compute)
    inputs = compute.place_inputs(examples.images)
    backend, h0 = PlainBackend(compute), placed(extractor, compute)
    if not reads:
        features = torch.zeros(len(inputs), 0, device=inputs.device)
    elif alone:
        features = PlainPredictor(model.features, compute).alone(h0, inputs)
    else:  # a trial computes as the simulator does
        extract = backend.extractor(model.features, batch_size=terms.batch_size)
        features = extract(h0, inputs, None)
    client = Client(config.number, inputs, examples.labels.to(compute.device), model, backend)
    released = client.release(
        terms.certainty, features, placed(public, compute), noise=release_noise(config, terms)
    )
    vector = released.vector.detach().cpu()
    guard.store_release(key, vector, released.entry, run=terms.plan.run)
    return Answer(ClientRelease(config.number, vector, released.entry), key, repeated=False)


def train(
    config: NodeConfig,
    guard: Guard,
    terms: TrainTerms,
    weights: Weights,
    extractor: Weights | None,
    rehearsal: Received | None = None,
    correction: Weights | None = None,
) -> Answer[Update]:
    """Train one round within the node's policy; answers that must be unique are stored and
    repeated. A correction is added to the gradients."""
    if _as_planned(terms.local) != _as_planned(terms.plan.local):
        raise Refusal("local: not the settings in the plan of this run")
    if not set(terms.objectives) <= set(terms.plan.objectives):
        raise Refusal("local.objectives: differ from the plan of this run")
    guard.check_update(terms.local, terms.objectives)  # before any work is done for it
    if correction is not None and terms.local.privacy is not None:
        raise Refusal("local.privacy: the gradients of private training are not corrected")
    check_declared(config, terms)
    public = public_images(guard, terms, rehearsal)
    if terms.mode == "linear":
        if terms.extractor == digest_of("extractor", {}):  # examples are features themselves
            extractor = {}
        elif extractor is not None:
            guard.keep_received("extractor", extractor)
        else:
            extractor = guard.received("extractor", terms.extractor or "")
        if extractor is None:
            raise Refusal("h0 is missing here; it must be sent with the message")
    # A private update has a cost, and kept moments change with it: neither may happen twice.
    once = terms.local.privacy is not None or terms.local.optimizer_state == "kept"
    groups = [weights] if rehearsal is None else [weights, {"beliefs": rehearsal.soft_labels}]
    groups += [] if correction is None else [correction]
    key = digest_of(terms.model_dump_json(exclude={"version", "plan"}), *groups)
    if once and (stored := guard.stored_answer(key)) is not None:
        held, about = stored
        repeated = below("weights/", held)
        entry = None
        if terms.local.privacy is not None:
            entry = _update_entry(config, terms, about["num_examples"])
        return Answer(
            Update(config.number, about["num_examples"], repeated, about["loss"], entry),
            key,
            repeated=True,
        )
    private = terms.local.privacy is not None
    alone = private and config.privacy.noise == "secure"
    compute = compute_of(config, terms, alone=alone)
    examples = own_examples(config, terms.classes)
    num_examples = len(examples.labels)
    check_batches(config, terms, num_examples=num_examples)
    check_whole(config, guard, terms, num_examples=num_examples)
    if private:
        guard.check_budget(_update_entry(config, terms, num_examples))
    model, backend = built(terms, compute), PlainBackend(compute)
    features, h0 = model.features, {} if extractor is None else placed(extractor, compute)

    def inputs_of(images: Tensor) -> Tensor:
        images = compute.place_inputs(images)
        if terms.mode == "full":
            return images
        if alone:
            return PlainPredictor(features, compute).alone(h0, images)
        return backend.extractor(features, batch_size=terms.batch_size)(h0, images, None)

    mirrored = None
    if terms.mirror and not private:
        mirrored = inputs_of(examples.images.flip(-1))
    if public is not None:
        public = inputs_of(torch.cat([public, public.flip(-1)]) if terms.mirror else public)
    model = model if terms.mode == "full" else head_alone(model)
    inputs, labels = inputs_of(examples.images), examples.labels.to(compute.device)
    client = Client(config.number, inputs, labels, model, backend)
    start = placed(weights, compute)
    kept: Mapping[str, Tensor] = {}
    if private:
        update = client.train_privately(
            start, terms.local, proximal=terms.proximal, draws=private_draws(config, terms, compute)
        )
    else:
        generator = seeding.generator(terms.seed, "local", round=terms.round, client=config.number)
        state = (
            placed(guard.kept(terms.run), compute) if terms.local.optimizer_state == "kept" else {}
        )
        update, trained = client.train(
            start,
            terms.local,
            proximal=terms.proximal,
            generator=generator,
            state=state,
            objectives=terms.objectives,
            num_classes=len(terms.classes),
            rehearsal=rehearsal_of(terms, rehearsal, public),
            mirrored=mirrored,
            correction=None if correction is None else placed(correction, compute),
        )
        if not math.isfinite(update.loss or 0.0) or not _finite(update.weights):
            raise Refusal("training with these weights and settings ends in NaN or infinity")
        if _finite(trained.optimizer_state):
            kept = trained.optimizer_state
    update = Update(
        config.number, num_examples, placed(update.weights, Compute()), update.loss, update.entry
    )
    if once:
        tensors = flat({"weights": update.weights, "kept": kept})
        about = {"num_examples": num_examples, "loss": update.loss}
        guard.store_answer(
            key, tensors, run=terms.run, plan=terms.plan.run, about=about, entry=update.entry
        )
    return Answer(update, key, repeated=False)


def check_whole(config: NodeConfig, guard: Guard, terms: Terms, *, num_examples: int) -> None:
    """Raise Refusal if this node would refuse any part of the run; ValueError if it could not do
    it."""
    if terms.plan.local is not None and terms.plan.local.privacy is not None:
        if (problem := refusal_of(_on_meta(terms))) is not None:
            raise Refusal(problem)
        check_ready([])
    check_plan(config, guard, terms.plan, num_examples=num_examples)


def check_map(
    config: NodeConfig, terms: PrepareTerms, public: Public, *, num_examples: int
) -> None:
    """Raise Refusal for a public map with which no release is possible, whatever the data.

    As many blank examples are released and thrown away. A map that failed after a look at the
    budget would tell, at no cost, whether a release fits it.
    """
    nothing = torch.zeros(num_examples, _on_meta(terms).feature_width)
    labels = torch.full((num_examples,), BLANK)
    mechanism = MECHANISMS[terms.certainty.mechanism](terms.certainty)
    try:
        mechanism.release(nothing, public, noise=release_noise(config, terms), labels=labels)
    except ValueError as error:
        raise Refusal(str(error)) from error
    except (RuntimeError, TypeError, LookupError, ArithmeticError) as error:
        raise Refusal("the public map cannot be used", detail=str(error)) from error


def _on_meta(terms: Terms) -> SplitModel:
    with torch.device("meta"):
        return _made(terms)


def _made(terms: Terms) -> SplitModel:
    section = terms.prototype
    model = MODELS[section.model](terms.image_shape, len(terms.classes), **section.options)
    return standardised(model) if terms.mode == "linear" else model


def release_noise(config: NodeConfig, terms: PrepareTerms) -> Noise:
    """Return secret noise; in a trial, the simulator's."""
    if config.privacy.noise == "secure":
        return noise_for(deployment=True)
    generator = release_stream(terms.certainty, seed=terms.seed, client=config.number)
    return noise_for(deployment=False, generator=generator)


def private_draws(config: NodeConfig, terms: TrainTerms, compute: Compute) -> Draws:
    """Return secret sampling and noise for private training; in a trial, the simulator's."""
    if config.privacy.noise == "secure":
        return SecureDraws()
    generator = seeding.generator(terms.seed, "local", round=terms.round, client=config.number)
    return SimulatedDraws(generator, device=compute.device)


def check_declared(config: NodeConfig, terms: Terms) -> None:
    """Raise Refusal if the server's terms do not match what node.toml declares. Uses no private
    data."""
    if set(terms.classes) != set(config.classes) or len(terms.classes) != len(config.classes):
        raise Refusal("the server's classes differ from this node's `classes`")
    encoder = None if config.encoder is None else encoder_of(config.encoder).digest
    if terms.encoder != encoder:
        raise Refusal(
            "the encoder of this node is not the encoder in the server's terms",
            detail=f"{config.encoder} has the digest {encoder}, the terms name {terms.encoder}",
        )
    shape = declared_shape(config)
    if shape != terms.image_shape:
        raise Refusal(f"examples here are {list(shape)} and the server's {list(terms.image_shape)}")
    for key in ("channel_mean", "channel_deviation") if len(shape) == 3 else ():
        if len(numbers := getattr(terms, key)) not in (0, shape[0]):
            raise Refusal(f"{key} has {len(numbers)} numbers for {shape[0]} channels")


def declared_shape(config: NodeConfig) -> tuple[int, ...]:
    """Return (channels, height, width) as declared in node.toml, or of embedded data and trials;
    (width,) of features, which their file states."""
    if config.data.path is None or config.split is not None:
        return tuple(own_data(config)[0].images.shape[1:])  # not private
    if config.encoder is not None:
        return (encoder_of(config.encoder).width,)
    if SOURCES[config.data.source].holds_features:
        return (feature_width(config.data),)
    side, channels = config.data.image_size, config.data.channels
    assert side is not None, "load_node requires it"
    assert channels is not None, "load_node requires it"
    return channels, side, side


@dataclass(frozen=True)
class OwnExamples:
    """All examples of this node, the unusable ones blank."""

    images: Tensor
    """uint8 [n, C, H, W], or features [n, F]."""
    labels: Tensor
    """[n], BLANK or the server's number of the class."""

    def without_blanks(self) -> OwnExamples:
        """Return only the usable examples, for unprotected releases."""
        usable = self.labels != BLANK
        return OwnExamples(self.images[usable], self.labels[usable])


def own_examples(config: NodeConfig, classes: tuple[str, ...]) -> OwnExamples:
    """Return this node's examples; examples that are unreadable or of undeclared classes are blank.

    Their number n is the number of rows in the data, whatever their content.
    """
    data, total = own_data(config)
    number = {name: index for index, name in enumerate(classes) if name in config.classes}
    table = torch.tensor([number.get(name, BLANK) for name in data.classes], dtype=torch.int64)
    labels = table[data.labels] if len(data.labels) else data.labels.long()
    unreadable = total - len(labels)
    return OwnExamples(
        torch.cat([data.images, data.images.new_zeros(unreadable, *data.images.shape[1:])]),
        torch.cat([labels, labels.new_full((unreadable,), BLANK)]),
    )


def own_data(config: NodeConfig) -> tuple[LabelledData, int]:
    """Return this node's readable training data and the number of all rows; in a trial, of its
    part.

    The number includes unreadable rows.
    """
    # UTF-8 as declared: the first bytes must not decide how all rows are read.
    section = config.data.model_copy(update={"skip_bad": True, "encoding": "utf-8"})
    split = config.split
    converter = None
    if config.encoder is not None:
        alone = config.privacy.noise == "secure"
        compute = _computing(config, Engine(device=config.device, compile=False), alone=alone)
        converter = Extractor(encoder_of(config.encoder), compute, batch_size=1 if alone else None)
    if split is None:
        return load_rows(section, converter=converter)
    if section.source not in SOURCES or SOURCES[section.source].load_labelled is None:
        raise ValueError(f"data.source = {section.source!r}: unknown, or without labels")
    data = load_labelled(section, converter=converter)
    parts = split_dirichlet(
        data.labels.numpy(),
        num_clients=split.num_clients,
        alpha=split.alpha,
        num_classes=len(data.classes),
        generator=seeding.generator(split.seed, "split"),
    )
    rows = torch.from_numpy(parts[config.number])
    own = LabelledData.for_training(data.images[rows], data.labels[rows], data.classes)
    return own, len(rows)


@cache
def encoder_of(path: str) -> Encoder:
    """Return the encoder of a node's file; nothing is downloaded or unpickled."""
    return of_file(Path(path), key="encoder")


def count_examples(config: NodeConfig) -> int:
    """Return the number of all rows of this node's data, without reading them; in a trial, of its
    part."""
    if config.split is not None:
        return own_data(config)[1]
    return count_rows(config.data.model_copy(update={"skip_bad": True}))


def compute_of(config: NodeConfig, terms: Terms, *, alone: bool = False) -> Compute:
    """Return plain computation on this node's device; `alone` for one example at a time."""
    engine = Engine(
        device=config.device, precision=terms.precision, compile=False, clients_at_once=1
    )
    data = Data(channel_mean=terms.channel_mean, channel_deviation=terms.channel_deviation)
    return _computing(config, engine, data, alone=alone)


def _computing(
    config: NodeConfig, engine: Engine, data: Data | None = None, *, alone: bool
) -> Compute:
    """Return how this node computes, with its own number of threads."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    compute = compute_for(engine, choose_device(config.device, key="device"), data)
    if not alone:
        return compute
    # Equal examples should have equal results, whatever a GPU finds fastest today.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    on_cpu = compute.device.type == "cpu"
    return replace(compute, workers=torch.get_num_threads() if on_cpu else 1)


def built(terms: Terms, compute: Compute) -> SplitModel:
    """Return the model of the terms with initial weights."""
    with seeding.initialisation(terms.seed, part=terms.prototype.name):
        return compute.place(_made(terms))


def placed(tensors: Mapping[str, Tensor], compute: Compute) -> dict[str, Tensor]:
    """Return tensors on a device."""
    return {name: tensor.to(compute.device) for name, tensor in tensors.items()}


def blank_model(terms: Terms, *, most_bytes: int) -> SplitModel:
    """Return the model on the meta device. Raises Refusal for one that is unknown or too large."""
    section = terms.prototype
    if section.model not in MODELS:
        raise Refusal(f"prototypes.model = {section.model}: not known here")
    if (
        model_input(section.model) == "text"
    ):  # these may name files, and file names from the network are not used
        raise Refusal(f"prototypes.model = {section.model}: nodes train models of images")
    known = model_options(section.model)
    wrong = [
        name
        for name, value in section.options.items()
        if name not in known or type(value) is not type(known[name])
    ]
    if wrong:
        raise Refusal(
            f"prototypes.options.{wrong[0]}: {section.model} has no such option of this type"
        )
    try:
        model = _on_meta(terms)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        raise Refusal(
            f"prototypes.model = {section.model}: cannot be built with these options"
        ) from error
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if size > most_bytes:
        raise Refusal(
            f"the model has {size} bytes, more than this node accepts",
            detail=f"limits.message_megabytes allows {most_bytes} bytes",
        )
    return model


def _update_entry(config: NodeConfig, terms: TrainTerms, num_examples: int) -> LedgerEntry:
    return update_entry(
        terms.local, num_examples=num_examples, client=config.number, noise=config.privacy.noise
    )


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def _as_planned(local: Local | None) -> Local | None:
    """Return the settings of training that a plan fixes. A server may change how strong objectives
    are, and the optimizer with the method: neither changes what a gradient costs."""
    free = {"strengths": {}, "optimizer": "adam", "learning_rate": 1.0}
    return None if local is None else local.model_copy(update=free)
