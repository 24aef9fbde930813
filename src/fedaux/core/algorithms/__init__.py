"""METHODS: the methods by name. Each is a program over the verbs of `core/server.py`; start with
`fedaux.py`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Literal

from fedaux.config import ExperimentFields
from fedaux.core.algorithms.bounds import LocalOnly, Pooled
from fedaux.core.algorithms.ccvr import Ccvr
from fedaux.core.algorithms.fedaux import FedAux
from fedaux.core.algorithms.fedaux2 import FedAux2
from fedaux.core.algorithms.fedauxfdp import FedAuxFdp
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.algorithms.fedbe import FedBE
from fedaux.core.algorithms.feddf import FedDF
from fedaux.core.algorithms.private_head import PrivateHead, PrivateStudent
from fedaux.core.algorithms.scaffold import FedDyn, Scaffold
from fedaux.core.algorithms.server_steps import FedAdam, FedAvgM, FedExP
from fedaux.core.asks import Asks
from fedaux.core.server import Method


def _and_from_h0(*methods: FedAvg) -> list[FedAvg]:
    """Return methods that start from scratch, each followed by the same from h0, `+p`."""
    return [
        own
        for method in methods
        for own in (method, replace(method, name=f"{method.name}+p", pretrained=True))
    ]


class Methods(dict[str, Method]):
    """Methods by name; `NAME@OPTIMIZER-RATE`, such as `fedavg+p@sgd-0.1`, is a method with this
    optimizer."""

    def __missing__(self, name: str) -> Method:
        found = re.fullmatch(r"(.+)@(adam|sgd)-(\d+\.?\d*(?:e-?\d+)?)", name)
        if found is None or not dict.__contains__(self, found[1]) or not float(found[3]) > 0:
            raise KeyError(name)
        optimizer: Literal["adam", "sgd"] = "adam" if found[2] == "adam" else "sgd"
        return replace(self[found[1]], name=name, optimizer=(optimizer, float(found[3])))

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self[name])
        except KeyError:
            return False


METHODS = Methods(
    (method.name, method)
    for method in (
        *_and_from_h0(FedAvg("fedavg")),
        FedAvg("fedavg+m", memory=True),
        FedAvg("fedavg+p+m", pretrained=True, memory=True),
        *_and_from_h0(
            FedAvg("fedprox", objectives=("proximal",)),
            FedAvg("fedlc", objectives=("fedlc",)),
            FedAvg("fedrs", objectives=("fedrs",)),
            FedAvg("fedntd", objectives=("not-true",)),
            FedAvg("fedvls", objectives=("balanced-softmax", "vacant-class", "suppression")),
            FedAvgM("fedavgm"),
            FedAdam("fedadam"),
            FedExP("fedexp"),
            Scaffold("scaffold"),
            FedDyn("feddyn"),
            Ccvr("ccvr"),
            FedDF("feddf"),
        ),
        FedDF("feddf+m", memory=True),
        FedDF("feddf+p+m", pretrained=True, memory=True),
        *_and_from_h0(FedBE("fedbe")),
        FedAux("fedaux"),
        FedAux("fedaux+m", memory=True),
        FedAux("fedaux+logits", mix="logits"),
        FedAux("fedaux+logits+m", mix="logits", memory=True),
        FedAux2("fedaux2"),
        FedAux2("fedcounts", mechanism="counts", distills=False),
        PrivateHead("private-head"),
        PrivateStudent("private-student"),
        FedAuxFdp("fedauxfdp"),
        *_and_from_h0(LocalOnly("local-only"), Pooled("pooled")),
    )
)
"""`fedaux` averages probabilities, as the paper's theory does; `fedaux+logits` is its Eq. 3."""


DEFAULTS = ExperimentFields()


def asks_of(name: str, experiment: ExperimentFields = DEFAULTS) -> Asks:
    """Return what a method asks of clients in an experiment."""
    return METHODS[name].asks(experiment)


def all_asks(experiment: ExperimentFields) -> dict[str, Asks]:
    """Return what the methods of an experiment ask of clients; unknown methods are left out."""
    return {name: METHODS[name].asks(experiment) for name in experiment.method if name in METHODS}
