"""METHODS: one row a method. A method is a choice on a few axes; everything else is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Method:
    """What distinguishes one federated method from another."""

    name: str
    start: Literal["scratch", "pretrained"]
    """Initial weights: random, or the features of h0 from self-supervised pretraining."""
    proximal: bool = False
    """Whether local training adds mu/2 ||theta - theta_server||^2 (`local.proximal` is mu)."""
    teacher: str | None = None
    """The key of `fedaux.ensemble.TEACHERS` that makes soft labels; without one there is no distillation."""
    scores: bool = False
    """Whether clients release certainty scores in the preparation phase."""
    memory: bool = False
    """Whether the teacher counts the last predictions of clients that are absent from a round (`+m`)."""

    def __post_init__(self) -> None:
        if self.memory and self.teacher is None:
            raise ValueError(f"method {self.name}: a memory is a teacher's; it should have one")


METHODS: dict[str, Method] = {
    "fedavg": Method("fedavg", start="scratch"),
    "fedavg+p": Method("fedavg+p", start="pretrained"),
    "fedprox": Method("fedprox", start="scratch", proximal=True),
    "fedprox+p": Method("fedprox+p", start="pretrained", proximal=True),
    "feddf": Method("feddf", start="scratch", teacher="mean"),
    "feddf+p": Method("feddf+p", start="pretrained", teacher="mean"),
    "feddf+m": Method("feddf+m", start="scratch", teacher="mean", memory=True),
    "feddf+p+m": Method("feddf+p+m", start="pretrained", teacher="mean", memory=True),
    "fedbe": Method("fedbe", start="scratch", teacher="bayesian"),
    "fedbe+p": Method("fedbe+p", start="pretrained", teacher="bayesian"),
    "fedaux": Method("fedaux", start="pretrained", teacher="certainty", scores=True),
    "fedaux+m": Method("fedaux+m", start="pretrained", teacher="certainty", scores=True, memory=True),
    "fedaux+mix": Method("fedaux+mix", start="pretrained", teacher="mixture", scores=True),
    "fedaux+mix+m": Method("fedaux+mix+m", start="pretrained", teacher="mixture", scores=True, memory=True),
}
