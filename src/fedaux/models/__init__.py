"""Models: f = head after features. A row of MODELS makes one for given inputs and classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from fedaux.models.bert import bert, minilm, tinybert
from fedaux.models.cnn import cnn
from fedaux.models.mlp import mlp
from fedaux.models.mobilenet import mobilenetv2, mobilenetv2_gn
from fedaux.models.resnet import resnet8, resnet8_gn
from fedaux.models.shufflenet import shufflenet, shufflenet_gn
from fedaux.models.split import SplitModel, split_model

MODELS: dict[str, Callable[..., SplitModel]] = {
    "bert": bert,
    "cnn": cnn,
    "minilm": minilm,
    "mlp": mlp,
    "mobilenetv2": mobilenetv2,
    "mobilenetv2-gn": mobilenetv2_gn,
    "resnet8": resnet8,
    "resnet8-gn": resnet8_gn,
    "shufflenet": shufflenet,
    "shufflenet-gn": shufflenet_gn,
    "tinybert": tinybert,
}
"""Each is called as model(shape, num_classes, **options). Its first parameter is called image_shape where it takes
images, (channels, height, width), and text_shape where it takes texts, (tokens, vocabulary)."""

SHIPPED = frozenset(MODELS)
"""Those that are not a user's own."""

__all__ = ["MODELS", "SHIPPED", "SplitModel", "model_input", "model_options", "split_model"]


def model_input(name: str) -> str | None:
    """Return what a model is made for, `image` or `text`, as its first parameter tells; None where it does not."""
    first = next(iter(inspect.signature(MODELS[name]).parameters))
    return first.removesuffix("_shape") if first in ("image_shape", "text_shape") else None


def model_options(name: str) -> dict[str, object]:
    """Return the options that a model takes, with their defaults."""
    parameters = inspect.signature(MODELS[name]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
