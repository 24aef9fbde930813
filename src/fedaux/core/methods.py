"""METHODS: one row a method. A method is a choice on a few axes; everything else is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STARTS = ("scratch", "pretrained")
MEMORIES = ("predictions", "weights")
EXCHANGES = ("models", "nothing", "data")


@dataclass(frozen=True)
class Method:
    """What distinguishes one federated method from another."""

    name: str
    start: Literal["scratch", "pretrained"]
    """Initial weights: random, or the features of h0 from self-supervised pretraining."""
    proximal: bool = False
    """Whether local training adds mu/2 ||theta - theta_server||^2 (`local.proximal` is mu)."""
    teacher: str | None = None
    """The key of `fedaux.core.teachers.TEACHERS`; None means no distillation."""
    scores: bool = False
    """Whether clients release certainty scores in the preparation phase."""
    memory: tuple[Literal["predictions", "weights"], ...] = ()
    """What counts of absent clients (`+m`): predictions for the teacher, weights in the average."""
    exchange: Literal["models", "nothing", "data"] = "models"
    """What clients share: models; nothing (each trains alone); data (one model of all of it)."""

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise ValueError(
                f"method {self.name}: start = {self.start!r}; should be one of {', '.join(STARTS)}"
            )
        if foreign := [what for what in self.memory if what not in MEMORIES]:
            raise ValueError(
                f"method {self.name}: memory = {foreign[0]!r}; should be of {', '.join(MEMORIES)}"
            )
        if "predictions" in self.memory and self.teacher is None:
            raise ValueError(
                f"method {self.name}: remembers predictions and has no teacher that would use them"
            )
        if self.exchange not in EXCHANGES:
            raise ValueError(
                f"method {self.name}: exchange = {self.exchange!r}; should be one of "
                f"{', '.join(EXCHANGES)}"
            )
        if self.exchange != "models" and (self.teacher is not None or self.scores):
            raise ValueError(
                f"method {self.name}: exchange = {self.exchange!r}, so there is no teacher and "
                "there are no scores; should be 'models'"
            )
        if self.exchange == "nothing" and "weights" not in self.memory:
            raise ValueError(
                f"method {self.name}: exchange = 'nothing', so each client goes on from its own "
                "model; memory should contain 'weights'"
            )

    @property
    def is_bound(self) -> bool:
        """Whether it is no federated method, but what such a method is compared with."""
        return self.exchange != "models"

    def looks_at(self, key: str) -> bool:
        """Whether a setting has an effect: no teacher, no distillation; no proximal term, no mu."""
        return not (key.startswith("distillation.") and self.teacher is None) and not (
            key == "local.proximal" and not self.proximal
        )


METHODS: dict[str, Method] = {
    "fedavg": Method("fedavg", start="scratch"),
    "fedavg+p": Method("fedavg+p", start="pretrained"),
    "fedavg+m": Method("fedavg+m", start="scratch", memory=("weights",)),
    "fedavg+p+m": Method("fedavg+p+m", start="pretrained", memory=("weights",)),
    "fedprox": Method("fedprox", start="scratch", proximal=True),
    "fedprox+p": Method("fedprox+p", start="pretrained", proximal=True),
    "feddf": Method("feddf", start="scratch", teacher="mean"),
    "feddf+p": Method("feddf+p", start="pretrained", teacher="mean"),
    "feddf+m": Method("feddf+m", start="scratch", teacher="mean", memory=("predictions",)),
    "feddf+p+m": Method("feddf+p+m", start="pretrained", teacher="mean", memory=("predictions",)),
    "fedbe": Method("fedbe", start="scratch", teacher="bayesian"),
    "fedbe+p": Method("fedbe+p", start="pretrained", teacher="bayesian"),
    "fedaux": Method("fedaux", start="pretrained", teacher="mixture", scores=True),
    "fedaux+m": Method(
        "fedaux+m", start="pretrained", teacher="mixture", scores=True, memory=("predictions",)
    ),
    "fedaux+logits": Method("fedaux+logits", start="pretrained", teacher="certainty", scores=True),
    "fedaux+logits+m": Method(
        "fedaux+logits+m",
        start="pretrained",
        teacher="certainty",
        scores=True,
        memory=("predictions",),
    ),
    "local-only": Method("local-only", start="scratch", memory=("weights",), exchange="nothing"),
    "local-only+p": Method(
        "local-only+p", start="pretrained", memory=("weights",), exchange="nothing"
    ),
    "pooled": Method("pooled", start="scratch", exchange="data"),
    "pooled+p": Method("pooled+p", start="pretrained", exchange="data"),
}
"""`fedaux` averages probabilities, as the paper's theory does; `fedaux+logits` is its Eq. 3."""
