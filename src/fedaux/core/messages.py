"""Messages between server and clients, and the protocol that clients implement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedaux.config import Certainty, Local
from fedaux.privacy.ledger import LedgerEntry
from fedaux.privacy.mechanism import Limits, Public

Weights = dict[str, Tensor]
"""A model's parameters and buffers by name."""
Measured = tuple[str, Weights, Tensor | None]
"""A model to measure: its prototype, its weights and, if it is personal, the class shares [C] of
its client."""


@dataclass(frozen=True)
class ClientState:
    """Tensors of one client that outlive a round, and the round they are from."""

    round: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class ReleaseRequest:
    """What the server sends in the preparation phase: h0 and the public map, per prototype."""

    extractors: Mapping[str, Weights]
    public: Mapping[str, Public]
    certainty: Certainty
    seed: int

    def num_bytes(self, prototype: str) -> int:
        """Return the size of the message to a client of this prototype."""
        return num_bytes(self.extractors[prototype]) + num_bytes(self.public[prototype])


@dataclass(frozen=True)
class ClientRelease:
    """A client's answer: the released vector and its price."""

    client: int
    vector: Tensor
    entry: LedgerEntry

    def num_bytes(self) -> int:
        """Return the size of the message."""
        return num_bytes({"vector": self.vector})


@dataclass(frozen=True)
class TrainRequest:
    """What the server sends in a round: the current model per prototype and how to train it."""

    round: int
    weights: Mapping[str, Weights]
    local: Local
    proximal: float
    seed: int
    extractors: Mapping[str, Weights] = field(default_factory=dict)
    """h0, if only heads are trained on its features; clients have it since the preparation."""
    wire: Literal["fp32", "fp16"] = "fp32"
    """The precision in which weights travel, both ways."""
    objectives: tuple[str, ...] = ()
    """What clients minimise besides cross-entropy."""
    rehearsed: int = 0
    """Public examples that join each batch."""
    soft_labels: Tensor | None = None
    """The soft labels that clients rehearse [M, C], times the strength of rehearsal."""
    mirror: bool = False
    """Whether clients train on half of the images mirrored, at random."""
    corrections: Mapping[int, Weights] = field(default_factory=dict)
    """What each client adds to its gradients, if the method corrects them."""

    def num_bytes(self, prototype: str, client: int = -1) -> int:
        """Return the size of the message to a client of this prototype."""
        soft_labels = {} if self.soft_labels is None else {"soft labels": self.soft_labels}
        sent = (self.weights[prototype], self.corrections.get(client, {}))
        return sum(num_bytes(own, wire=self.wire) for own in sent) + num_bytes(soft_labels)


@dataclass(frozen=True)
class Update:
    """A client's answer: its trained weights, the size of its data, and its mean training loss.

    If training was differentially private, `entry` is what it cost, and the loss stays at the
    client.
    """

    client: int
    num_examples: int
    weights: Weights
    loss: float | None
    entry: LedgerEntry | None = None

    def num_bytes(self, *, wire: str = "fp32") -> int:
        """Return the size of the message."""
        return num_bytes(self.weights, wire=wire)


@dataclass(frozen=True)
class Member:
    """A model that takes part in a round: a client's answer, or its remembered answer; NO_CLIENT
    is the client of a drawn model."""

    client: int
    prototype: str
    num_examples: int
    weights: Weights
    """Empty for a client of which only predictions are remembered."""
    share: float = 1.0
    """Its weight relative to other members; below 1 for a remembered one with a discount."""
    logits: Tensor | None = None
    """Its predictions f_i(x) on the distill set [N, C], where the server has them."""


class Clients(Protocol):
    """The clients of a federation. Iterators may yield fewer answers than clients, in any order."""

    def present(self) -> Sequence[int]:
        """Return the ids of clients that can be asked now, in ascending order."""
        ...

    def sizes(self, clients: Sequence[int]) -> Sequence[int]:
        """Return the numbers of examples n_i, or nothing where they are not known beforehand."""
        ...

    def release(self, clients: Sequence[int], request: ReleaseRequest) -> Iterator[ClientRelease]:
        """Ask for certainty releases (preparation phase)."""
        ...

    def train(self, clients: Sequence[int], request: TrainRequest) -> Iterator[Update]:
        """Ask for local training (one round)."""
        ...

    def reasons(self) -> Mapping[int, str]:
        """Return why clients that were asked last did not answer, if that is known."""
        ...

    def class_shares(self, client: int) -> Tensor:
        """Return a client's class shares [C], which simulated clients alone tell."""
        ...

    def client_states(self) -> Mapping[int, ClientState]:
        """Return what clients keep between rounds and a run has to store."""
        ...

    def load_client_states(self, kept: Mapping[int, ClientState]) -> None:
        """Restore what clients kept between rounds."""
        ...


WIRE = {"fp32": torch.float32, "fp16": torch.float16}
"""Precisions in which weights cross a network; only single-precision tensors are converted."""


def num_bytes(tensors: Mapping[str, Tensor], *, wire: str = "fp32") -> int:
    """Return the size of tensors on the network, in bytes."""
    return sum(tensor.numel() * sent_as(tensor.dtype, wire).itemsize for tensor in tensors.values())


def sent_as(dtype: torch.dtype, wire: str) -> torch.dtype:
    """Return the type in which a tensor travels."""
    return WIRE[wire] if dtype is torch.float32 else dtype


def as_received(weights: Weights, *, wire: str) -> Weights:
    """Return weights as the other side receives them: rounded to the precision of the wire.

    Numbers that are too large are clamped: infinity would make the whole message unusable.
    """
    return {name: shortened(tensor, wire=wire).to(tensor.dtype) for name, tensor in weights.items()}


def shortened(tensor: Tensor, *, wire: str) -> Tensor:
    """Return a tensor in the type in which it travels; NaN and infinity stay."""
    dtype = sent_as(tensor.dtype, wire)
    if dtype is tensor.dtype:
        return tensor
    limit = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-limit, limit)).to(dtype)


def problem_of_release(vector: Tensor, *, width: int, limits: Limits) -> str | None:
    """Return why a release cannot be used, or None: wrong shape, NaN or infinity, or numbers that
    the mechanism cannot have released."""
    if tuple(vector.shape) != (width,):
        return f"released {list(vector.shape)} numbers, should be {width}"
    if not bool(torch.isfinite(vector).all()):
        return "released NaN or infinity"
    return limits.problem(vector)


def problem_of(update: Update, *, expected: Weights) -> str | None:
    """Return why an update cannot be used, or None: wrong tensors or shapes, NaN or infinity."""
    if update.num_examples < 1:
        return f"claims {update.num_examples} examples"
    if missing := sorted(expected.keys() - update.weights.keys()):
        return f"tensor {missing[0]} is missing"
    if foreign := sorted(update.weights.keys() - expected.keys()):
        return f"tensor {foreign[0]} is unknown"
    for name, tensor in update.weights.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            return (
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, "
                f"should be {expected[name].dtype} {list(expected[name].shape)}"
            )
    floats = {name: tensor for name, tensor in update.weights.items() if tensor.is_floating_point()}
    if not surely_finite(list(floats.values())):
        for name, tensor in floats.items():
            if not bool(torch.isfinite(tensor).all()):
                return f"tensor {name} holds NaN or infinity"
    if update.loss is not None and not math.isfinite(update.loss):
        return f"training came to a loss of {update.loss}"
    return None


def surely_finite(tensors: Sequence[Tensor]) -> bool:
    """Return True if no tensor holds NaN or infinity; False also if numbers are merely huge.

    A norm is finite only if every number is.
    """
    if not tensors:
        return True
    device = next(
        (tensor.device for tensor in tensors if tensor.is_cuda), tensors[0].device
    )  # a counter may lie elsewhere
    norms = torch._foreach_norm(list(tensors))
    return bool(
        torch.isfinite(torch.stack([norm.to(device, torch.float32) for norm in norms])).all()
    )
