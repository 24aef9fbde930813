"""The layers of a network in training, of several clients at once: where values lie, and how
kernels are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from fedaux.fast.triton import common, convolutions, tiling
from fedaux.fast.triton.tiling import Shape, Split

DEPTH = 64
"""Channels that a product takes at a time."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> None:
    """Launch a kernel, before the one it waits for has ended if kernels are made for it."""
    if common.EARLY.value:
        constants["launch_pdl"] = True
    kernel[grid](*arguments, num_warps=warps, num_stages=stages, **constants)


def divided(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)


class Stack:
    """Values of all parameters of several clients in one tensor, grouped by parameter:
    [clients, elements].

    Weights of convolutions lie in the order of channels_last, [O, kh, kw, C].
    """

    def __init__(
        self, shapes: Mapping[str, torch.Size], *, clients: int, device: torch.device
    ) -> None:
        self.clients = clients
        self.device = device
        self.shapes = dict(shapes)
        self.strides = {name: divided(shape.numel(), 64) * 64 for name, shape in shapes.items()}
        self.offsets: dict[str, int] = {}
        self.length = 0
        for name, stride in self.strides.items():
            self.offsets[name] = self.length
            self.length += clients * stride

    def zeros(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return values that are zero."""
        return torch.zeros(self.length, dtype=dtype, device=self.device)

    def flat(self, values: Tensor, name: str) -> Tensor:
        """Return where a parameter's values lie, in memory's order [clients * stride]."""
        begin = self.offsets[name]
        return values[begin : begin + self.clients * self.strides[name]]

    def of(self, values: Tensor, name: str) -> Tensor:
        """Return a parameter's values as a view [clients, ...] of its shape."""
        shape = self.shapes[name]
        lines = self.flat(values, name).view(self.clients, -1)[:, : shape.numel()]
        if len(shape) == 4:
            outputs, inputs, height, width = shape
            return lines.view(self.clients, outputs, height, width, inputs).permute(0, 1, 4, 2, 3)
        return lines.view(self.clients, *shape)


@dataclass
class Normalisation:
    """One batch normalisation of all clients: parameters, running statistics, sums and what they
    lead to."""

    path: str
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    variance: Tensor
    sums: Tensor
    coefficients: Tensor
    eps: float
    momentum: float

    @property
    def forward(self) -> tuple[Tensor, ...]:
        """What `apply_fwd` takes."""
        return self.sums, self.gamma, self.beta, self.mean, self.variance, self.coefficients


@dataclass
class Tail:
    """What the gradient of a layer's input goes through next: a ReLU and the normalisation
    before it."""

    out: Tensor
    residual: Tensor
    z: Tensor
    coefficients: Tensor
    h: Tensor
    zs: Tensor
    sums: Tensor
    adds: bool = False
    """Whether `residual` is another gradient that is added first."""
    by_output: bool = False
    """Whether the ReLU's output h says what passes, and not z."""
    second: bool = False
    """Whether zs, of a convolution on the shortcut, has been added before the ReLU."""

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """What kernels that end in `tail` take."""
        return self.out, self.residual, self.z, self.coefficients, self.h, self.zs, self.sums

    @property
    def flags(self) -> dict[str, bool]:
        """What `tail` should do."""
        return {"RES": self.adds, "BY_H": self.by_output, "SECOND": self.second}


class Convolution:
    """One convolution of all clients, with its buffers; `size` is the height and width of its
    output."""

    def __init__(
        self,
        path: str,
        module: nn.Conv2d,
        norm: Normalisation,
        *,
        size_in: int,
        sizes: Tensor,
        padded_batch: int,
        weight: Tensor,
    ) -> None:
        self.path, self.norm, self.weight = path, norm, weight
        self.clients, self.padded_batch, self.sizes = len(sizes), padded_batch, sizes
        self.outputs, self.inputs = module.out_channels, module.in_channels
        self.kernel, self.stride = module.kernel_size[0], module.stride[0]
        self.size_in, self.size = size_in, size_in // self.stride
        self.positions = padded_batch * self.size**2
        """The parameters of one client."""
        self.shape = Shape(
            self.clients, self.positions, self.outputs, self.inputs, self.kernel, self.stride
        )
        self.split: Split = tiling.split_of(self.shape)
        self.z = torch.zeros(
            self.clients * padded_batch,
            self.size,
            self.size,
            self.outputs,
            dtype=weight.dtype,
            device=weight.device,
        )
        self.g = torch.zeros_like(self.z)
        self.x: Tensor
        self.part: Tensor

    def _box(self, positions: int) -> tuple[int, int]:
        """Return images and rows of a tile of so many positions."""
        area = self.size**2
        return (1, positions // self.size) if positions <= area else (positions // area, self.size)

    def _inputs(self, images: int, rows: int, channels: int) -> TensorDescriptor:
        n, s, c = self.clients * self.padded_batch, self.size_in, self.inputs
        if self.stride == 1:
            return TensorDescriptor(
                self.x, [n, s, s, c], [s * s * c, s * c, c, 1], [images, rows, self.size, channels]
            )
        half = s // 2  # rows and columns by their parity
        return TensorDescriptor(
            self.x,
            [n, half, 2, half, 2 * c],
            [s * s * c, 2 * s * c, s * c, 2 * c, 1],
            [images, rows, 1, self.size, channels],
        )

    def _gradients(self, images: int, rows: int, channels: int) -> TensorDescriptor:
        n, s, o = self.clients * self.padded_batch, self.size, self.outputs
        return TensorDescriptor(
            self.g, [n, s, s, o], [s * s * o, s * o, o, 1], [images, rows, s, channels]
        )

    def _weights(self, rows: int, columns: int) -> TensorDescriptor:
        width = self.kernel**2 * self.inputs
        return TensorDescriptor(
            self.weight, [self.clients * self.outputs, width], [width, 1], [rows, columns]
        )

    def forward(self) -> None:
        """z and its sums from x."""
        how = tiling.tile_of(self.shape, "forward")
        images, rows = self._box(how.positions)
        tiles = self.positions // how.positions
        launch(
            convolutions.conv_fwd, (self.clients * tiles, self.outputs // how.channels),
            self._inputs(images, rows, DEPTH), self._weights(how.channels, DEPTH), self.z,
            self.norm.sums, self.sizes,
            self.padded_batch, tiles, H=self.size, W=self.size, C=self.inputs, OUT=self.outputs,
            KS=self.kernel,
            STRIDE=self.stride, NB=images, HB=rows, BO=how.channels, BK=DEPTH, warps=how.warps,
            stages=how.stages,
        )  # fmt: skip

    def backward(self, tail: Tail, short: Convolution | None = None) -> None:
        """The gradient of x [with that of the shortcut], through the tail."""
        how = tiling.tile_of(self.shape, "backward")
        images, rows = self._box(how.positions)
        tiles = self.positions // how.positions
        other = short or self
        launch(
            convolutions.conv_dgrad, (self.clients * tiles, self.inputs // how.channels,
            1 if self.stride == 1 else 4),
            self._gradients(images, rows, DEPTH), self._weights(DEPTH, how.channels),
            other._gradients(images, rows, DEPTH), other._weights(DEPTH, how.channels),
            *tail.arguments, self.sizes,
            self.padded_batch, tiles, H=self.size, W=self.size, C=self.inputs, OUT=self.outputs,
            STRIDE=self.stride,
            SHORT=short is not None, NB=images, HB=rows, BI=how.channels, BK=DEPTH,
            warps=how.warps, stages=how.stages,
            **tail.flags,
        )  # fmt: skip

    @property
    def splits(self) -> tuple[int, int]:
        """In how many splits a client's rows are taken for the weight's gradient, and rows of
        one."""
        images, rows = self._box(self.split.positions)
        every = self.padded_batch * self.size
        each = divided(divided(every, self.split.splits), images * rows) * images * rows
        return divided(every, each), each

    def weigh(self) -> None:
        """The gradient of the weight, in splits."""
        how = self.split
        images, rows = self._box(how.positions)
        splits, each = self.splits
        columns = self.kernel**2 * self.inputs
        flat = TensorDescriptor(
            self.g,
            [self.clients * self.positions, self.outputs],
            [self.outputs, 1],
            [how.positions, how.outputs],
        )
        launch(
            convolutions.conv_wgrad,
            (self.clients * splits, self.outputs // how.outputs,
            columns // (how.taps * how.inputs)),
            flat, self._inputs(images, rows, how.inputs), self.part, self.sizes, self.padded_batch,
            splits, each,
            H=self.size, W=self.size, C=self.inputs, OUT=self.outputs, KS=self.kernel,
            STRIDE=self.stride, NB=images,
            HB=rows, BO=how.outputs, BI=how.inputs, TAPS=how.taps, warps=how.warps,
            stages=how.stages,
        )  # fmt: skip
