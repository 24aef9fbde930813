"""FedGKD (Yao et al. 2021): clients also learn the predictions of a second model, the server's.

    fedaux run demo --plugin examples/methods/fedgkd.py --set 'method=["fedgkd+p","fedavg+p"]'

A local objective runs at the clients. Nodes of a federation refuse one that they do not know.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedaux import METHODS
from fedaux.core.algorithms.fedavg import FedAvg
from fedaux.core.objectives import OBJECTIVES, Objective


def global_distillation(logits: Tensor, labels: Tensor, beliefs: Tensor, prior: Tensor) -> Tensor:
    """Return D_KL(server || client) of each row [B]; beliefs are the server's probabilities."""
    return (torch.xlogy(beliefs, beliefs) - beliefs * torch.log_softmax(logits, dim=1)).sum(dim=1)


OBJECTIVES["global-distillation"] = Objective(strength=0.1, term=global_distillation)
METHODS["fedgkd"] = FedAvg("fedgkd", objectives=("global-distillation",))
METHODS["fedgkd+p"] = FedAvg("fedgkd+p", pretrained=True, objectives=("global-distillation",))
