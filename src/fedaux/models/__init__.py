"""Models f = head after features, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from fedaux.models.bert import bert, minilm, tinybert
from fedaux.models.cnn import cnn
from fedaux.models.linear import linear
from fedaux.models.mlp import mlp
from fedaux.models.mobilenet import mobilenetv2, mobilenetv2_gn
from fedaux.models.resnet import resnet8, resnet8_gn
from fedaux.models.shufflenet import shufflenet, shufflenet_gn
from fedaux.models.split import SplitModel, split_model

MODELS: dict[str, Callable[..., SplitModel]] = {
    "bert": bert,
    "cnn": cnn,
    "linear": linear,
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
"""Called as model(shape, num_classes, **options). The first parameter is named image_shape for
images, (channels, height, width), text_shape for texts, (tokens, vocabulary), and feature_shape for
feature vectors, (width,)."""

SHIPPED = frozenset(MODELS)
"""The models of fedaux, without models of plugins."""

__all__ = ["MODELS", "SHIPPED", "SplitModel", "model_input", "model_options", "split_model"]


def model_input(name: str) -> str | None:
    """Return `image`, `text` or `feature`, by the name of a model's first parameter, or None."""
    first = next(iter(inspect.signature(MODELS[name]).parameters))
    kinds = ("image_shape", "text_shape", "feature_shape")
    return first.removesuffix("_shape") if first in kinds else None


def model_options(name: str) -> dict[str, object]:
    """Return the options of a model with their defaults."""
    parameters = inspect.signature(MODELS[name]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY
    }
