"""A node's part of the work: its own data, and the simulator's way of releasing and training with one client."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaux import seeding
from fedaux.config import Data, Engine, Evaluation, ExperimentFields, Local, Split
from fedaux.core.compute import Compute, compute_for
from fedaux.core.dpsgd import update_entry
from fedaux.core.messages import Certificate, CertifyRequest, Stamped, TrainRequest, Update, Weights
from fedaux.core.methods import METHODS
from fedaux.core.simulation import SimulatedClients
from fedaux.core.task import Task
from fedaux.data import SOURCES, LabelledData, load_labelled, load_own, split_dirichlet
from fedaux.federation.node import NodeConfig
from fedaux.federation.policy import Guard, Refusal, digest_of
from fedaux.federation.terms import PrepareTerms, Terms, TrainTerms
from fedaux.models import MODELS, SplitModel, model_input, model_options
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Noise, Public
from fedaux.privacy.secure import noise_for


@dataclass(frozen=True)
class Answer:
    """A trained update and what is said with it."""

    update: Update
    repeated: bool
    """Whether it was stored and is sent again."""


class OwnClient(SimulatedClients):
    """The simulator with this node's client alone in it. Noise is drawn here, unless the node plays a trial."""

    def __init__(self, config: NodeConfig, task: Task, images: Tensor, labels: Tensor) -> None:
        nobody = np.zeros(0, dtype=np.int64)
        super().__init__(task, images, labels, [nobody] * config.number + [np.arange(len(labels))])
        self._secure = config.privacy.noise == "secure"
        self.update_noise = update_noise(config)

    def noise(self, request: CertifyRequest, client: int) -> Noise:
        """Return noise that nobody else can know; in a trial, the simulator's."""
        return noise_for(deployment=True) if self._secure else super().noise(request, client)

    def generator(self, request: TrainRequest, client: int) -> np.random.Generator:
        """Return the simulator's order of examples; where training is private, one that nobody else can know."""
        if self._secure and request.local.privacy is not None:
            return np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        return super().generator(request, client)


def prepare(config: NodeConfig, guard: Guard, terms: PrepareTerms, extractor: Weights, public: Public) -> Certificate:
    """Release certainty for h0 and the public map, within the node's terms; a second time, the stored release."""
    guard.check_release(terms.certainty)
    about = {"certainty", "prototype", "image_shape", "channel_mean", "channel_deviation"}
    key = digest_of(terms.model_dump_json(include=about) + config.privacy.noise, extractor, public)
    if terms.mode == "linear":
        guard.keep_extractor(extractor)
    if (stored := guard.stored_release(key)) is not None:
        return Certificate(config.number, *stored)
    client, task = own_client(config, terms)
    name = terms.prototype.name
    on_device = {key: tensor.to(task.compute.device) for key, tensor in public.items()}
    request = CertifyRequest({name: placed(extractor, task.compute)}, {name: on_device}, terms.certainty, terms.seed)
    (certificate,) = client.certify([config.number], request)
    vector = certificate.vector.detach().cpu()
    guard.store_release(key, vector, certificate.entry)
    return Certificate(config.number, vector, certificate.entry)


def train(config: NodeConfig, guard: Guard, terms: TrainTerms, weights: Weights, extractor: Weights | None) -> Answer:
    """Train one round within the node's terms; where an answer must not be made twice, the stored one is repeated."""
    if terms.mode == "linear":
        if extractor is not None:
            guard.keep_extractor(extractor)
        extractor = guard.extractor(terms.extractor or "") if extractor is None else extractor
        if extractor is None:
            raise Refusal("h0 is missing here; it has to come with the message")
    # A private update costs when it is made, and kept moments move when it is: neither may happen twice.
    once = terms.local.privacy is not None or terms.local.optimizer_state == "kept"
    key = digest_of(terms.model_dump_json(), weights) if once else ""
    if once and (stored := guard.stored_answer(key)) is not None:
        held, about = stored
        repeated = {name.removeprefix("weights/"): one for name, one in held.items() if name.startswith("weights/")}
        entry = None
        if terms.local.privacy is not None:
            entry = _update_entry(config, terms, about["num_examples"])
        return Answer(Update(config.number, about["num_examples"], repeated, about["loss"], entry), repeated=True)
    client, task = own_client(config, terms)
    num_examples = client.num_examples(config.number)
    guard.check_update(terms.local, _update_entry(config, terms, num_examples) if terms.local.privacy else None)
    name = terms.prototype.name
    compute = task.compute
    request = TrainRequest(
        terms.round,
        {name: placed(weights, compute)},
        terms.local,
        terms.proximal,
        terms.seed,
        {} if extractor is None else {name: placed(extractor, compute)},
    )
    if terms.local.optimizer_state == "kept" and (kept := guard.kept(terms.run)):
        client.restore({config.number: Stamped(terms.round - 1, placed(kept, compute))})
    (update,) = client.train([config.number], request)
    update = Update(config.number, num_examples, placed(update.weights, Compute()), update.loss, update.entry)
    if once:
        tensors = {f"weights/{name}": tensor for name, tensor in update.weights.items()}
        for stamped in client.kept().values():
            tensors |= {f"kept/{name}": tensor for name, tensor in stamped.tensors.items()}
        about = {"num_examples": num_examples, "loss": update.loss}
        guard.store_answer(key, tensors, run=terms.run, about=about, entry=update.entry)
    return Answer(update, repeated=False)


def update_noise(config: NodeConfig) -> str:
    """Return what the ledger says of noise in private training: nobody can foretell it, but it is rounded."""
    return "unpredictable" if config.privacy.noise == "secure" else "simulated"


def own_client(config: NodeConfig, terms: Terms) -> tuple[OwnClient, Task]:
    """Return this node's client with its data, and the task it works on."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose(config.device)
    data = own_data(config)
    shape = tuple(data.images.shape[1:])
    if shape != terms.image_shape:
        raise Refusal(
            f"images here are {list(shape)} and the server's {list(terms.image_shape)}; "
            "data.image_size and data.channels of the node change them"
        )
    labels = _numbered(data, terms.classes)
    for key in ("channel_mean", "channel_deviation"):
        if len(numbers := getattr(terms, key)) not in (0, shape[0]):
            raise Refusal(f"{key} has {len(numbers)} numbers for {shape[0]} channels")
    task = task_of(config, terms, device)
    return OwnClient(config, task, data.images.to(device), labels.to(device)), task


def own_data(config: NodeConfig) -> LabelledData:
    """Load this node's training data: all of it or, in a trial, the part that the simulator would give it."""
    section, split = config.data, config.split
    if section.source not in SOURCES or SOURCES[section.source].load_labelled is None:
        raise ValueError(f"data.source = {section.source!r}: not known, or without labels")
    if split is None:
        return load_own(section)
    data = load_labelled(section)
    parts = split_dirichlet(
        data.labels.numpy(),
        num_clients=split.num_clients,
        alpha=split.alpha,
        num_classes=len(data.classes),
        generator=seeding.generator(split.seed, "split"),
    )
    rows = torch.from_numpy(parts[config.number])
    return LabelledData(data.images[rows], data.labels[rows], data.test_images[:0], data.test_labels[:0], data.classes)


def task_of(config: NodeConfig, terms: Terms, device: torch.device) -> Task:
    """Return the task as far as a client sees it: one prototype, no public data."""
    prototype = terms.prototype.model_copy(update={"clients": None})
    engine = Engine(device=config.device, precision=terms.precision, compile=False, clients_at_once=1)
    data = Data(channel_mean=terms.channel_mean, channel_deviation=terms.channel_deviation)
    experiment = ExperimentFields(
        prototypes=(prototype,),
        mode=terms.mode,
        data=data,
        split=Split(num_clients=config.number + 1),
        evaluation=Evaluation(batch_size=terms.batch_size),
        engine=engine,
        local=terms.local if isinstance(terms, TrainTerms) else Local(),
    )
    nothing = torch.zeros(0, *terms.image_shape, dtype=torch.uint8, device=device)
    return Task(
        experiment=experiment,
        method=METHODS["fedavg"],  # what the server makes of the answers is its own affair
        seed=terms.seed,
        input_shape=terms.image_shape,
        num_classes=len(terms.classes),
        prototype_of=(prototype.name,) * (config.number + 1),
        negatives=nothing,
        distill_images=nothing,
        test_images=nothing,
        test_labels=torch.zeros(0, dtype=torch.int64, device=device),
        compute=compute_for(engine, device, data),
    )


def choose(name: str) -> torch.device:
    """Return the node's device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def placed(tensors: Mapping[str, Tensor], compute: Compute) -> dict[str, Tensor]:
    """Return tensors on a device."""
    return {name: tensor.to(compute.device) for name, tensor in tensors.items()}


def blank_model(terms: Terms, *, most_bytes: int) -> SplitModel:
    """Return the model without memory for its weights. Raises Refusal for one that is unknown or too large."""
    section = terms.prototype
    if section.model not in MODELS:
        raise Refusal(f"prototypes.model = {section.model}: not known here")
    if model_input(section.model) == "text":  # those of texts may name files, and names from the network are not used
        raise Refusal(f"prototypes.model = {section.model}: nodes train models of images")
    known = model_options(section.model)
    wrong = [
        name for name, value in section.options.items() if name not in known or type(value) is not type(known[name])
    ]
    if wrong:
        raise Refusal(f"prototypes.options.{wrong[0]}: {section.model} has no such option, or not of this kind")
    try:
        with torch.device("meta"):
            model = MODELS[section.model](terms.image_shape, len(terms.classes), **section.options)
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise Refusal(f"prototypes.model = {section.model}: cannot be built with these options") from error
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    if size > most_bytes:
        raise Refusal(f"the model has {size} bytes; this node takes {most_bytes}")
    return model


def _numbered(data: LabelledData, classes: tuple[str, ...]) -> Tensor:
    """Return labels as the server numbers the classes. Raises Refusal for a class that it does not know."""
    number = {name: index for index, name in enumerate(classes)}
    held = sorted(set(data.labels.tolist()))
    if any(data.classes[label] not in number for label in held):
        raise Refusal("holds classes that the server's test data does not name")
    table = torch.tensor([number.get(name, -1) for name in data.classes], dtype=torch.int64)
    return table[data.labels]


def _update_entry(config: NodeConfig, terms: TrainTerms, num_examples: int) -> LedgerEntry:
    return update_entry(terms.local, num_examples=num_examples, client=config.number, noise=update_noise(config))
