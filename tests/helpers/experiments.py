"""A tiny experiment that runs in about a second."""

from __future__ import annotations

from typing import Any

from fedaux.config import Experiment
from fedaux.models import MODELS, model_input
from fedaux.recipes import merged

IMAGE_MODELS = [name for name in MODELS if model_input(name) == "image"]

TINY: dict[str, Any] = {
    "name": "tiny",
    "method": ["fedaux"],
    "rounds": 3,
    "participation_rate": 1.0,
    "auxiliary": {"source": "letters", "size": 200},
    "split": {"num_clients": 4, "alpha": 0.1},
    "prototypes": [{"name": "cnn", "model": "cnn", "options": {"width": 4}}],
    "pretraining": {"epochs": 1, "batch_size": 64, "augmentation": {"flip": 0.0}},
    "certainty": {"epsilon": 1.0, "components": 4},
    "distillation": {"learning_rate": 0.001},
    "data": {"source": "digits", "size": 480},
    "engine": {"device": "cpu", "threads": 1},
}
WHOLE: dict[str, Any] = {"size": None}
"""Changes `data` to all 1438 training examples."""


def tiny(**changes: Any) -> Experiment:
    """Return the tiny experiment with changes; other data are used whole."""
    if "source" in changes.get("data", {}):
        changes["data"] = WHOLE | changes["data"]
    return Experiment(**merged(TINY, changes))
