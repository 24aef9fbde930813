"""A plugin: `fedaux2` without one of its parts, and its peers with parts of it.

    fedaux run demo --plugin examples/ablation.py --set 'method=["fedaux2","fedaux2-rehearsal"]'

`fedaux2-X` lacks part X. A peer's name tells its additions: `adj` logit adjustment, `reh`
rehearsal, `head` a start from the private head instead of `p`, h0 alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedaux import METHODS
from fedaux.config import ExperimentFields
from fedaux.core.algorithms.fedaux2 import FedAux2
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.algorithms.private_head import class_sums, start_with_head
from fedaux.core.asks import Asks
from fedaux.core.server import Server
from fedaux.core.task import State

WHOLE = METHODS["fedaux2"]
assert isinstance(WHOLE, FedAux2)
WITHOUT = {
    "head": replace(WHOLE, start=0.0),
    "adjustment": replace(WHOLE, objectives=("rehearsal",)),
    "rehearsal": replace(WHOLE, objectives=("logit-adjusted",)),
    "teacher": replace(WHOLE, distills=False),
    "correction": replace(WHOLE, corrects=False),
    "memory": replace(WHOLE, memory=False),
    "anchor": replace(WHOLE, anchor=0.0),
    "rate": replace(WHOLE, server_rate=1.0),
    "by-class": replace(WHOLE, by_class=False),
    "smoothing": replace(WHOLE, smoothing=0.0),
}
OBJECTIVES = {"adj": "logit-adjusted", "reh": "rehearsal"}


@dataclass(frozen=True)
class FromHead(FedAvg):
    """A peer that starts from the private head."""

    def asks(self, settings: ExperimentFields) -> Asks:
        """Ask for class sums as well."""
        return replace(super().asks(settings), pretrained=True, releases=(class_sums(settings),))

    def prepare(self, server: Server) -> State:
        """Start from the private head."""
        return start_with_head(server, share=lambda _: 1.0)


@dataclass(frozen=True)
class FedDFFromHead(FromHead, FedDF):
    """FedDF from the private head."""


for part, method in WITHOUT.items():
    name = f"fedaux2-{part}"
    METHODS[name] = replace(method, name=name)
for peer in ("fedavg", "fedprox", "feddf"):
    plain = METHODS[f"{peer}+p"]
    assert isinstance(plain, FedAvg)
    kind = FedDFFromHead if peer == "feddf" else FromHead
    from_head = kind(f"{peer}+head", objectives=plain.objectives)
    for start, one in (("p", plain), ("head", from_head)):
        for given in ((), ("adj",), ("reh",), ("adj", "reh")):
            name = "+".join((peer, start, *given))
            own = tuple(OBJECTIVES[part] for part in given)
            METHODS.setdefault(name, replace(one, name=name, objectives=one.objectives + own))
