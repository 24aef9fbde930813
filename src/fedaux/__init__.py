"""Federated learning with unlabeled auxiliary data.

`fedaux.run(fedaux.Experiment(...))` is `fedaux run` in Python. Names are imported on first use, so
that `import fedaux` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from fedaux.config import ConfigError, Experiment
    from fedaux.core.algorithms import METHODS
    from fedaux.core.server import Method
    from fedaux.encoders import Encoder, Images
    from fedaux.models import MODELS, SplitModel, split_model
    from fedaux.predict.trained_model import TrainedModel, load
    from fedaux.recipes import load_experiment
    from fedaux.running.plugins import load_plugin
    from fedaux.running.run import Result, run

_HOMES = {
    "ConfigError": "fedaux.config",
    "Encoder": "fedaux.encoders",
    "Images": "fedaux.encoders",
    "Experiment": "fedaux.config",
    "load_experiment": "fedaux.recipes",
    "load_plugin": "fedaux.running.plugins",
    "Result": "fedaux.running.run",
    "run": "fedaux.running.run",
    "TrainedModel": "fedaux.predict.trained_model",
    "load": "fedaux.predict.trained_model",
    "METHODS": "fedaux.core.algorithms",
    "Method": "fedaux.core.server",
    "MODELS": "fedaux.models",
    "SplitModel": "fedaux.models",
    "split_model": "fedaux.models",
}

__all__ = [
    "METHODS",
    "MODELS",
    "ConfigError",
    "Encoder",
    "Experiment",
    "Images",
    "Method",
    "Result",
    "SplitModel",
    "TrainedModel",
    "load",
    "load_experiment",
    "load_plugin",
    "run",
    "split_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedaux' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
