"""A training step of ResNet-8 for several clients at once, put together from kernels: forward,
backward and Adam."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from fedaux.core.objectives import CROSS_ENTROPY, LocalLoss
from fedaux.fast.triton import head_and_optimizer, input_conv, normalisation, padded_batch_size
from fedaux.fast.triton.layers import Convolution, Normalisation, Stack, Tail, divided, launch
from fedaux.models import SplitModel

BLOCK = 1024
"""Elements of a program that goes over parameters."""
ROWS = 64
"""Positions of a program that goes over activations."""
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Adam's, which the project leaves at their defaults."""


@dataclass
class Block:
    """A basic block: its convolutions, what they leave and the gradients of that."""

    a: Convolution
    b: Convolution
    s: Convolution | None
    inner: Tensor
    h: Tensor
    d_inner: Tensor
    d: Tensor
    sums_inner: Tensor
    sums: Tensor
    """Of d: with a convolution on the shortcut three rows, otherwise two."""


class Network:
    """ResNet-8 of several clients in training: their weights, moments and statistics, and a step
    for all of them."""

    def __init__(
        self,
        model: SplitModel,
        inputs: Tensor,
        targets: Tensor,
        *,
        clients: int,
        batch_size: int,
        capacity: int,
        precision: torch.dtype,
        weight_decay: float = 0.0,
        proximal: float = 0.0,
        mean: Tensor | None = None,
        deviation: Tensor | None = None,
        side: torch.cuda.Stream | None = None,
        loss: LocalLoss = CROSS_ENTROPY,
    ) -> None:
        features: Any = model.features
        self.device = targets.device
        self.clients, self.batch_size, self.capacity = clients, batch_size, capacity
        self.padded_batch = padded_batch_size(batch_size)
        self.precision, self.weight_decay, self.proximal = precision, weight_decay, proximal
        self.inputs = inputs
        # Soft labels are read as they lie; a teacher may have left them transposed, or in another
        # precision.
        self.targets = (targets.float() if targets.is_floating_point() else targets).contiguous()
        channels = inputs.shape[1]
        none, one = (
            torch.zeros(channels, device=self.device),
            torch.ones(channels, device=self.device),
        )
        self.mean = none if mean is None else mean.flatten().float().contiguous()
        self.deviation = one if deviation is None else deviation.flatten().float().contiguous()
        self.image_size, self.channels = inputs.shape[2], channels
        self._side = side

        # Each begins where addresses are multiples of 16, as Triton likes them: no other
        # compilation for one client.
        integers = torch.zeros(6, divided(clients, 4) * 4, dtype=torch.int32, device=self.device)[
            :, :clients
        ]
        self.ahead = integers[:2]
        self.rows_of, self.epoch_len, self.following, self.starts, self.sizes, self.steps = integers
        self.rows = torch.zeros(clients, capacity, dtype=torch.int64, device=self.device)
        self.corrections = torch.zeros(clients, 2, device=self.device)
        self.total = torch.zeros(clients, device=self.device)
        self.rate = torch.zeros((), device=self.device)

        self.stack = Stack(
            {name: p.shape for name, p in model.named_parameters()},
            clients=clients,
            device=self.device,
        )
        self.params_fp32, self.first, self.second = (
            self.stack.zeros(),
            self.stack.zeros(),
            self.stack.zeros(),
        )
        self.params_bf16 = self.stack.zeros(precision)
        self.anchor = self.stack.zeros() if proximal > 0 else self.params_fp32
        buffers = {name: buffer.shape for name, buffer in model.named_buffers()}
        counts = [name for name, shape in buffers.items() if not shape]
        self.tracked = torch.zeros(len(counts), clients, dtype=torch.int64, device=self.device)
        """Batches that the statistics of each layer have seen, [layers, clients]."""
        self.statistics = dict(zip(counts, self.tracked, strict=True)) | {
            name: torch.zeros(clients, *shape, device=self.device)
            for name, shape in buffers.items()
            if shape
        }
        """Buffers of the clients' models by name, [clients, ...]."""
        layers = [
            layer[0]
            for layer in (features.layer1, features.layer2, features.layer3, features.layer4)
        ]
        widths = [features.conv1.out_channels, *(layer.conv1.out_channels for layer in layers)]
        # A block has three normalisations at most, with two rows of sums forward each, and two and
        # three rows back.
        self._sums = torch.zeros(clients * sum(11 * width for width in widths), device=self.device)
        self._taken = 0

        size = self.image_size
        self.norm0 = self._normalisation("features.bn1", features.bn1)
        self.z0, self.h0, self.d0 = (self.activations(size, widths[0]) for _ in range(3))
        self.sums0 = self.take_sums(2 * widths[0])
        self.blocks: list[Block] = []
        x = self.h0
        for number, layer in enumerate(layers, 1):
            block = self._block(number, layer, size)
            block.a.x, block.b.x = x, block.inner
            if block.s is not None:
                block.s.x = x
            self.blocks.append(block)
            size, x = block.a.size, block.h
        self.convolutions = [
            conv
            for block in self.blocks
            for conv in (block.a, block.b, block.s)
            if conv is not None
        ]
        self.classes, self.width = self.stack.shapes["head.weight"]
        self.padded_classes = max(16, triton.next_power_of_2(self.classes))
        self.features = torch.zeros(clients, self.padded_batch, self.width, device=self.device)
        self.errors = torch.zeros(
            clients, self.padded_batch, self.padded_classes, device=self.device
        )
        self.loss, self.private = loss, len(targets)
        shape = (clients, 2, self.padded_classes) if loss.adjusted else (1, 2, 1)
        self.adjustment = torch.zeros(shape, device=self.device)
        """Scale and offset of each client's logits, `LocalLoss`."""
        public = len(inputs) - len(targets) if loss.rehearsed else 1
        self.beliefs = torch.zeros(public, self.classes, device=self.device)
        """Soft labels of the public rows, which follow the private ones in `inputs`."""
        self._plan_sums_of_parts()

    def activations(self, size: int, channels: int) -> Tensor:
        """Return room for the activations of all clients, [clients * padded_batch, size, size,
        channels], zero."""
        return torch.zeros(
            self.clients * self.padded_batch,
            size,
            size,
            channels,
            dtype=self.precision,
            device=self.device,
        )

    def take_sums(self, count: int) -> Tensor:
        """Return room for so many sums of each client, which every step sets to zero."""
        begin = self._taken
        self._taken += self.clients * count
        assert self._taken <= len(self._sums)
        return self._sums[begin : self._taken]

    def _normalisation(self, path: str, module: nn.BatchNorm2d) -> Normalisation:
        assert module.momentum is not None
        channels = module.num_features
        return Normalisation(
            path,
            self.stack.flat(self.params_fp32, f"{path}.weight"),
            self.stack.flat(self.params_fp32, f"{path}.bias"),
            self.statistics[f"{path}.running_mean"],
            self.statistics[f"{path}.running_var"],
            self.take_sums(2 * channels),
            torch.zeros(self.clients, 4, channels, device=self.device),
            module.eps,
            module.momentum,
        )

    def _block(self, number: int, layer: Any, size: int) -> Block:
        path = f"features.layer{number}.0"

        def made(at: str, norm: str, size_in: int) -> Convolution:
            return Convolution(
                f"{path}.{at}.weight",
                layer.get_submodule(at),
                self._normalisation(f"{path}.{norm}", layer.get_submodule(norm)),
                size_in=size_in,
                sizes=self.sizes,
                padded_batch=self.padded_batch,
                weight=self.stack.flat(self.params_bf16, f"{path}.{at}.weight"),
            )

        a = made("conv1", "bn1", size)
        b = made("conv2", "bn2", a.size)
        s = None if layer.downsample is None else made("downsample.0", "downsample.1", size)
        inner, h, d_inner, d = (torch.zeros_like(a.z) for _ in range(4))
        sums_inner, sums = (
            self.take_sums(2 * a.outputs),
            self.take_sums((2 if s is None else 3) * a.outputs),
        )
        return Block(a, b, s, inner, h, d_inner, d, sums_inner, sums)

    def _plan_sums_of_parts(self) -> None:
        """Give gradients that are made in splits their place, and write the table by which Adam
        adds them up."""
        assert self.stack.offsets["features.conv1.weight"] == 0, (
            "`advance` sets gradients at the beginning to zero"
        )
        positions = self.padded_batch * self.image_size**2
        self.stem_each = max(64, divided(divided(self.clients * positions, 528), 64) * 64)
        self.stem_splits = divided(positions, self.stem_each)
        splits = {}
        for conv in self.convolutions:
            splits[conv.path] = conv.splits[0]
        stack, length = self.stack, self.stack.length
        parts: dict[str, tuple[int, int]] = {}
        lines = []
        for path, shape in stack.shapes.items():
            count, elements = splits.get(path, 1), shape.numel()
            parts[path] = (
                (length, count * elements)
                if count > 1
                else (stack.offsets[path], stack.strides[path])
            )
            length += self.clients * count * elements if count > 1 else 0
            start = [*parts[path], stack.offsets[path], stack.strides[path], elements, count]
            lines += [[*start, begin, 0] for begin in range(0, elements, BLOCK)]
        self.arena = torch.zeros(length, device=self.device)
        for conv in self.convolutions:
            conv.part = self.arena[parts[conv.path][0] :]
        self.table = torch.tensor(lines, dtype=torch.int32, device=self.device)

    def _gradients(self, path: str) -> tuple[Tensor, Tensor]:
        """Return where the gradients of a layer's weight and bias go, at the beginning of the
        arena."""
        return self.stack.flat(self.arena, f"{path}.weight"), self.stack.flat(
            self.arena, f"{path}.bias"
        )

    def refresh(self) -> None:
        """Take the weights as they are now."""
        self.params_bf16.copy_(self.params_fp32)

    def step(self) -> None:
        """Take one step of every client that has rows left."""
        self._advance()
        self._forward()
        self._backward()
        self._update()

    def _advance(self) -> None:
        stem = self.clients * self.stack.strides["features.conv1.weight"]
        launch(
            head_and_optimizer.advance, (divided(max(len(self._sums), stem), BLOCK),), self._sums,
            len(self._sums), self.arena,
            stem, self.rows_of, self.epoch_len, self.following, self.starts, self.sizes,
            self.steps, self.tracked,
            self.corrections, self.clients, self.batch_size, len(self.tracked),
            LOG1=math.log(BETAS[0]),
            LOG2=math.log(BETAS[1]), KP=triton.next_power_of_2(self.clients),
            LP=triton.next_power_of_2(len(self.tracked)), BLOCK=BLOCK,
        )  # fmt: skip

    @property
    def _images(self) -> tuple[Tensor, ...]:
        return self.inputs, self.rows, self.starts, self.mean, self.deviation

    @property
    def _stem(self) -> dict[str, Any]:
        return {
            "H": self.image_size, "W": self.image_size, "CH": self.channels, "OUT": self.z0.shape[-1],
            "BYTES": self.inputs.dtype is torch.uint8,
        }  # fmt: skip

    def _forward(self) -> None:
        area = self.image_size**2
        tiles = self.padded_batch * area // 128
        launch(
            input_conv.stem_fwd, (self.clients * tiles,), *self._images,
            self.stack.flat(self.params_bf16, "features.conv1.weight"), self.z0, self.norm0.sums,
            self.sizes, self.capacity,
            self.padded_batch, tiles, *self.inputs.stride(), BP=128, **self._stem,
        )  # fmt: skip
        self._normalise(self.z0, self.norm0, self.h0)
        for block in self.blocks:
            a, b, s = block.a, block.b, block.s
            with self._beside():
                if s is not None:
                    s.forward()
            a.forward()
            self._normalise(a.z, a.norm, block.inner)
            b.forward()
            self._join()
            self._normalise(b.z, b.norm, block.h, a.x if s is None else s)

    def _normalise(
        self, z: Tensor, norm: Normalisation, out: Tensor, short: Tensor | Convolution | None = None
    ) -> None:
        """out = relu(bn(z) + the shortcut, or its normalised convolution)."""
        size, channels = z.shape[1], z.shape[3]
        other = (
            (short.z, *short.norm.forward)
            if isinstance(short, Convolution)
            else (z if short is None else short, *norm.forward)
        )
        tiles = divided(self.padded_batch * size * size, ROWS)
        launch(
            normalisation.apply_fwd, (self.clients * tiles, channels // 64), z, *norm.forward,
            *other, out, self.sizes,
            self.padded_batch, tiles, size * size, C=channels,
            SHORT=0 if short is None else 2 if isinstance(short, Convolution) else 1, BC=64,
            BR=ROWS, EPS=norm.eps,
            MOMENTUM=norm.momentum,
        )  # fmt: skip

    def _backward(self) -> None:
        last = self.blocks[-1]
        assert last.s is not None
        stack, bias_stride = self.stack, self.stack.strides["head.bias"]
        launch(
            head_and_optimizer.head, (self.clients * self.padded_batch,), last.h, last.b.z,
            last.s.z,
            stack.flat(self.params_fp32, "head.weight"), stack.flat(self.params_fp32, "head.bias"),
            self.targets, self.rows,
            self.starts, self.features, self.errors, self.total, last.d, last.sums, self.sizes,
            self.adjustment, self.beliefs, self.private, self.capacity,
            self.padded_batch, self.classes, bias_stride, F=self.width, AREA=last.b.size**2,
            CP=self.padded_classes,
            BF=min(self.width, max(16, 8192 // self.padded_classes)),
            SOFT=self.targets.is_floating_point(), ADJUSTED=self.loss.adjusted,
            REHEARSED=self.loss.rehearsed, warps=8,
        )  # fmt: skip
        with self._beside():
            tiles = self.width // 64
            launch(
                head_and_optimizer.head_wgrad, (self.clients * tiles,), self.features, self.errors,
                *self._gradients("head"),
                self.sizes, self.padded_batch, tiles, self.classes, bias_stride, F=self.width,
                CP=self.padded_classes, BF=64,
                BR=32,
            )  # fmt: skip
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            a, b, s = block.a, block.b, block.s
            self._back(b, block.d, block.sums, s)
            with self._beside():
                b.weigh()
                if s is not None:
                    s.weigh()
            b.backward(self._inner_tail(block))
            self._back(a, block.d_inner, block.sums_inner)
            with self._beside():
                a.weigh()
            a.backward(self._tail_below(index), s)
        norm = self.norm0
        launch(
            input_conv.stem_wgrad, (self.clients * self.stem_splits,), *self._images, self.d0,
            self.sums0, self.z0,
            norm.coefficients, *self._gradients(norm.path), self.arena, self.sizes, self.capacity,
            self.padded_batch,
            self.stem_splits, self.stem_each, *self.inputs.stride(), BP=64, **self._stem,
        )  # fmt: skip
        self._join()

    def _back(
        self, conv: Convolution, d: Tensor, sums: Tensor, short: Convolution | None = None
    ) -> None:
        """conv.g (and short.g) from d, the gradient behind the normalisation."""
        other, norm = short or conv, conv.norm
        tiles = divided(conv.positions, ROWS)
        launch(
            normalisation.apply_bwd, (self.clients * tiles, conv.outputs // 64), d, sums, conv.z,
            norm.coefficients,
            *self._gradients(norm.path), conv.g, other.z, other.norm.coefficients,
            *self._gradients(other.norm.path),
            other.g, self.sizes, self.padded_batch, tiles, conv.size**2, C=conv.outputs,
            SHORT=short is not None, BC=64,
            BR=ROWS,
        )  # fmt: skip

    def _inner_tail(self, block: Block) -> Tail:
        """What the gradient of the second convolution's input goes through."""
        z, coefficients = block.a.z, block.a.norm.coefficients
        return Tail(block.d_inner, z, z, coefficients, z, z, block.sums_inner)

    def _tail_below(self, index: int) -> Tail:
        """What the gradient of a block's input goes through."""
        if index == 0:
            z, res = self.z0, self.blocks[0].d
            return Tail(self.d0, res, z, self.norm0.coefficients, self.h0, z, self.sums0, adds=True)
        block = self.blocks[index - 1]
        b, s = block.b, block.s
        zs = b.z if s is None else s.z
        d, coefficients = block.d, b.norm.coefficients
        return Tail(
            d, d, b.z, coefficients, block.h, zs, block.sums, by_output=True, second=s is not None
        )

    def _update(self) -> None:
        launch(
            head_and_optimizer.adam, (len(self.table), self.clients), self.table, self.arena,
            self.params_fp32, self.anchor, self.first,
            self.second, self.params_bf16, self.corrections, self.rate, self.sizes, B1=BETAS[0],
            B2=BETAS[1], EPS=EPSILON,
            DECAY=self.weight_decay, PROXIMAL=self.proximal, BLOCK=BLOCK, warps=8,
        )  # fmt: skip

    def _beside(self) -> AbstractContextManager[Any]:
        """What follows runs on the other stream, if there is one."""
        if self._side is None:
            return nullcontext()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._side)

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._side)
