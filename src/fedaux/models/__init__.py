"""Models: f = head after features. A row of MODELS makes one for given inputs and classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from fedaux.models.cnn import cnn
from fedaux.models.mlp import mlp
from fedaux.models.mobilenet import mobilenetv2, mobilenetv2_gn
from fedaux.models.resnet import resnet8, resnet8_gn
from fedaux.models.shufflenet import shufflenet, shufflenet_gn
from fedaux.models.split import SplitModel, split_model

MODELS: dict[str, Callable[..., SplitModel]] = {
    "cnn": cnn,
    "mlp": mlp,
    "mobilenetv2": mobilenetv2,
    "mobilenetv2-gn": mobilenetv2_gn,
    "resnet8": resnet8,
    "resnet8-gn": resnet8_gn,
    "shufflenet": shufflenet,
    "shufflenet-gn": shufflenet_gn,
}
"""Each is called as model(image_shape, num_classes, **options) with image_shape = (channels, height, width)."""

__all__ = ["MODELS", "SplitModel", "model_options", "split_model"]


def model_options(name: str) -> dict[str, object]:
    """Return the options that a model takes, with their defaults."""
    parameters = inspect.signature(MODELS[name]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
