"""MobileNetV2 and ShuffleNet as lists of steps, with the interface of
`fedaux.fast.fusion.FusedInference`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedaux.core.messages import Weights
from fedaux.fast.convolutions import patches
from fedaux.fast.depthwise import MOST_NUMBERS, out_size
from fedaux.fast.fusion import with_normalisation
from fedaux.fast.triton import IMAGE_SIZE
from fedaux.fast.triton.predictions import tiling
from fedaux.fast.triton.predictions.packing import Packed, Packing
from fedaux.fast.triton.predictions.steps import Narrowing, Pointwise, Residual, Step, run
from fedaux.fast.triton.predictions.units import Opening, Unit, quarter_of
from fedaux.models import SplitModel
from fedaux.models.convolutional import MATRIX_MULTIPLE, ImageConvolution
from fedaux.models.mobilenet import InvertedResidual
from fedaux.models.shufflenet import ShuffleNetFeatures, ShuffleUnit

Folded = dict[str, Packed]


class StepInference:
    """Steps of a network, or of its features alone; `fold` prepares a set of weights for them,
    and a call runs them."""

    def __init__(self, module: nn.Module) -> None:
        self._has_head = isinstance(module, SplitModel)
        features, self._path = (
            (module.features, "features.") if isinstance(module, SplitModel) else (module, "")
        )
        self._stem = next(
            layer for layer in features.modules() if isinstance(layer, ImageConvolution)
        )
        self.steps = (
            shufflenet_steps(features, self._stem, size=IMAGE_SIZE)
            if isinstance(features, ShuffleNetFeatures)
            else mobilenet_steps(features, self._stem, size=IMAGE_SIZE)
        )
        named = dict(module.named_modules())
        convolutions = [name for name, layer in named.items() if isinstance(layer, nn.Conv2d)]
        norms = [
            (name, layer) for name, layer in named.items() if isinstance(layer, nn.BatchNorm2d)
        ]
        self._layers = dict(
            zip(convolutions, norms, strict=True)
        )  # in either network one is behind the other
        self._packing = Packing(self.steps)
        self.most_images = MOST_NUMBERS // max(step.largest for step in self.steps)
        """In a call of the kernels, which count in 32 bits; more are taken in parts."""

    def fold(self, weights: Weights, *, dtype: torch.dtype) -> Folded:
        """Return the weights as the kernels read them: normalisation inside, channels in their
        places."""
        parts = {
            name.removeprefix(self._path): (weight.float(), bias.float())
            for name, (weight, bias) in with_normalisation(weights, self._layers).items()
        }
        folded = self._packing({step.name: step.weights(parts) for step in self.steps}, dtype=dtype)
        if self._has_head:
            folded["head"] = {"weight": weights["head.weight"], "bias": weights["head.bias"]}
        return folded

    def prepared(self, inputs: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return images [N, C, H, W] as calls take them, whatever the weights: as patches."""
        return patches(self._stem, inputs.to(dtype))

    def __call__(self, folded: Folded, inputs: Tensor) -> Tensor:
        """Return logits, or features, on inputs, which `prepared` has made of the images."""
        if len(inputs) > self.most_images:
            return torch.cat([self(folded, part) for part in inputs.split(self.most_images)])
        maps = {"patches": inputs.flatten(0, 2)}
        with torch.cuda.device_of(inputs):  # Triton launches on the current one
            run(self.steps, folded, maps)
        (features,) = maps.values()
        if not self._has_head:
            return features
        return functional.linear(features.float(), folded["head"]["weight"], folded["head"]["bias"])


def mobilenet_steps(features: nn.Module, stem: ImageConvolution, *, size: int) -> Sequence[Step]:
    """Return the steps of MobileNetV2's features: a block is one, or its expansion and the rest,
    as there are tiles."""
    tiles, layers = tiling.MOBILENETV2, list(features.children())
    steps: list[Step] = [_stem_step(stem, tiles["stem"], "0.0", size=size, cut="relu6")]
    blocks = [layer for layer in layers if isinstance(layer, InvertedResidual)]
    for index, block in enumerate(blocks, start=1):
        layers_of = {
            path: layer for path, layer in block.named_modules() if isinstance(layer, nn.Conv2d)
        }
        names, convolutions = (
            tuple(f"{index}.{path}" for path in layers_of),
            list(layers_of.values()),
        )
        inputs, hidden, stride = (
            convolutions[0].in_channels,
            convolutions[-1].in_channels,
            convolutions[-2].stride[0],
        )
        name, source = f"block {index}", str(index - 1)
        wide = source
        if f"{name} expand" in tiles:
            wide = f"{index} wide"
            steps.append(
                Pointwise(
                    name=f"{name} expand", tile=tiles[f"{name} expand"], convolution=names[0], source=source,
                    goal=wide, inputs=inputs, outputs=hidden, size=size, cut="relu6",
                )
            )  # fmt: skip
        shape = {
            "inputs": inputs,
            "hidden": hidden,
            "outputs": convolutions[-1].out_channels,
            "size": size,
            "stride": stride,
        }
        if name in tiles:
            steps.append(
                Residual(
                    name=name, tile=tiles[name], convolutions=names, source=source, goal=str(index), adds=block.adds,
                    **shape,
                )
            )  # fmt: skip
        else:
            steps.append(
                Narrowing(
                    name=f"{name} narrow", tile=tiles[f"{name} narrow"], convolutions=names[-2:], source=wide,
                    short=source, goal=str(index), adds=block.adds, **shape,
                )
            )  # fmt: skip
        size = out_size(size, stride)
    last = layers[len(blocks) + 1].get_submodule("0")
    assert isinstance(last, nn.Conv2d)
    steps.append(
        Pointwise(
            name="last", tile=tiles["last"], convolution=f"{len(blocks) + 1}.0", source=str(len(blocks)),
            goal="features", inputs=last.in_channels, outputs=last.out_channels, size=size, cut="relu6", area=size**2,
        )
    )  # fmt: skip
    return steps


def shufflenet_steps(
    features: ShuffleNetFeatures, stem: ImageConvolution, *, size: int
) -> Sequence[Step]:
    """Return the steps of ShuffleNet's features: one a unit, which ends with the next unit's
    first product."""
    tiles = tiling.SHUFFLENET
    units = [
        (name, unit) for name, unit in features.named_modules() if isinstance(unit, ShuffleUnit)
    ]
    path, first = units[0]
    steps: list[Step] = [
        _stem_step(stem, tiles["stem"], "conv1", size=size, cut="relu"),
        Opening(
            name="first", tile=tiles["first"], convolution=f"{path}.conv1", source="0", goal="0.hidden",
            inputs=first.conv1.in_channels, outputs=4 * quarter_of(first.conv1.out_channels), size=size, cut="relu",
        ),
    ]  # fmt: skip
    for index, (path, unit) in enumerate(units, start=1):
        stride, inputs = unit.conv2.stride[0], unit.conv1.in_channels
        after = units[index] if index < len(units) else None
        out = out_size(size, stride)
        steps.append(
            Unit(
                name=f"unit {index}", tile=tiles[f"unit {index}"], convolutions=(f"{path}.conv2", f"{path}.conv3"),
                hidden_source=f"{index - 1}.hidden", source=str(index - 1), goal=str(index), inputs=inputs,
                hidden=unit.conv1.out_channels, outputs=unit.conv3.out_channels + (inputs if stride == 2 else 0),
                size=size, stride=stride, following=f"{after[0]}.conv1" if after else "",
                following_hidden=after[1].conv1.out_channels if after else 0, area=0 if after else out**2,
            )
        )  # fmt: skip
        size = out
    return steps


def _stem_step(
    stem: ImageConvolution, tile: tiling.Tile, convolution: str, *, size: int, cut: str
) -> Pointwise:
    numbers = stem.in_channels * stem.kernel_size[0] * stem.kernel_size[1]
    return Pointwise(
        name="stem", tile=tile, convolution=convolution, source="patches", goal="0",
        inputs=-(-numbers // MATRIX_MULTIPLE) * MATRIX_MULTIPLE, outputs=stem.out_channels, size=size, cut=cut,
    )  # fmt: skip
