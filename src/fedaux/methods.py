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
    """Whether the teacher remembers clients that are absent from a round."""


METHODS: dict[str, Method] = {
    "fedavg": Method("fedavg", start="scratch"),
    "fedavg+p": Method("fedavg+p", start="pretrained"),
    "fedprox": Method("fedprox", start="scratch", proximal=True),
    "fedprox+p": Method("fedprox+p", start="pretrained", proximal=True),
    "feddf": Method("feddf", start="scratch", teacher="mean"),
    "feddf+p": Method("feddf+p", start="pretrained", teacher="mean"),
    "fedaux": Method("fedaux", start="pretrained", teacher="certainty", scores=True),
    "fedaux+mix": Method("fedaux+mix", start="pretrained", teacher="mixture", scores=True),
}
