"""Depthwise 3x3 convolutions on a GPU in half precision, channels last, as three kernels of their
own.

cuDNN's kernels for one channel per group are slow in this layout, above all for gradients of
weights. They are used if Triton is missing or cannot compile.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fedaux.fast.fallback import attempt

INSTALLED = find_spec("triton") is not None
MOST_CHANNELS = 64
"""Channels per program, at most."""
POSITIONS = 32
"""Positions per program; half as many at a time if it keeps nine sums of each."""
MOST_NUMBERS = 2**31 - 1
"""Of a tensor, since kernels count in 32 bits."""
PROGRAMS = 1024
"""Programs that share the sums of a weight's gradient, about: they fill a GPU several times."""

if INSTALLED:
    import triton
    import triton.language as tl

    @triton.jit
    def _convolve(
        inputs, weight, bias, outputs, positions, most,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
        CHANNELS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
        HAS_BIAS: tl.constexpr, CUTS: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        across = place % OUT_WIDTH
        down = (place // OUT_WIDTH) % OUT_HEIGHT
        image = place // (OUT_WIDTH * OUT_HEIGHT)
        real = channel < CHANNELS
        total = tl.zeros((BLOCK, BLOCK_CHANNELS), dtype=tl.float32)
        if HAS_BIAS:
            total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                row = down * STRIDE + i - 1
                column = across * STRIDE + j - 1
                inside = (
                    (place < positions)
                    & (row >= 0)
                    & (row < HEIGHT)
                    & (column >= 0)
                    & (column < WIDTH)
                )
                start = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
                x = tl.load(
                    inputs + start[:, None] + channel[None, :],
                    mask=inside[:, None] & real[None, :],
                    other=0.0,
                )
                w = tl.load(weight + channel * 9 + i * 3 + j, mask=real, other=0.0)
                total += x.to(tl.float32) * w.to(tl.float32)[None, :]
        if CUTS:
            total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
            total = tl.minimum(total, most, propagate_nan=tl.PropagateNan.ALL)
        goal = outputs + (place * CHANNELS)[:, None] + channel[None, :]
        tl.store(
            goal,
            total.to(outputs.dtype.element_ty),
            mask=(place < positions)[:, None] & real[None, :],
        )

    @triton.jit
    def _back_to_inputs(
        gradient, weight, outputs, positions,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
        CHANNELS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        across = place % WIDTH
        down = (place // WIDTH) % HEIGHT
        image = place // (WIDTH * HEIGHT)
        real = channel < CHANNELS
        total = tl.zeros((BLOCK, BLOCK_CHANNELS), dtype=tl.float32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                row = down + 1 - i  # stride times the row of the output that this tap belongs to
                column = across + 1 - j
                fits = (row >= 0) & (column >= 0) & (row % STRIDE == 0) & (column % STRIDE == 0)
                row = row // STRIDE
                column = column // STRIDE
                inside = (place < positions) & fits & (row < OUT_HEIGHT) & (column < OUT_WIDTH)
                start = ((image * OUT_HEIGHT + row) * OUT_WIDTH + column) * CHANNELS
                g = tl.load(
                    gradient + start[:, None] + channel[None, :],
                    mask=inside[:, None] & real[None, :],
                    other=0.0,
                )
                w = tl.load(weight + channel * 9 + i * 3 + j, mask=real, other=0.0)
                total += g.to(tl.float32) * w.to(tl.float32)[None, :]
        goal = outputs + (place * CHANNELS)[:, None] + channel[None, :]
        tl.store(
            goal,
            total.to(outputs.dtype.element_ty),
            mask=(place < positions)[:, None] & real[None, :],
        )

    @triton.jit
    def _back_to_weight(
        gradient, inputs, parts, positions, share,
        HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr,
        CHANNELS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHANNELS: tl.constexpr,
    ):  # fmt: skip
        channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
        real = channel < CHANNELS
        first = tl.program_id(0) * share
        s00 = tl.zeros((BLOCK, BLOCK_CHANNELS), dtype=tl.float32)
        s01 = s00
        s02 = s00
        s10 = s00
        s11 = s00
        s12 = s00
        s20 = s00
        s21 = s00
        s22 = s00
        for begin in range(0, share, BLOCK):
            place = first + begin + tl.arange(0, BLOCK)
            across = place % OUT_WIDTH
            down = (place // OUT_WIDTH) % OUT_HEIGHT
            image = place // (OUT_WIDTH * OUT_HEIGHT)
            here = (place < positions)[:, None] & real[None, :]
            g = tl.load(
                gradient + (place * CHANNELS)[:, None] + channel[None, :], mask=here, other=0.0
            ).to(tl.float32)
            centre = ((image * HEIGHT + down * STRIDE) * WIDTH + across * STRIDE) * CHANNELS
            x = inputs + centre[:, None] + channel[None, :]
            above = (down > 0)[:, None] & here
            below = (down * STRIDE + 1 < HEIGHT)[:, None] & here
            left = (across > 0)[:, None]
            right = (across * STRIDE + 1 < WIDTH)[:, None]
            s00 += g * tl.load(x - (WIDTH + 1) * CHANNELS, mask=above & left, other=0.0).to(
                tl.float32
            )
            s01 += g * tl.load(x - WIDTH * CHANNELS, mask=above, other=0.0).to(tl.float32)
            s02 += g * tl.load(x - (WIDTH - 1) * CHANNELS, mask=above & right, other=0.0).to(
                tl.float32
            )
            s10 += g * tl.load(x - CHANNELS, mask=here & left, other=0.0).to(tl.float32)
            s11 += g * tl.load(x, mask=here, other=0.0).to(tl.float32)
            s12 += g * tl.load(x + CHANNELS, mask=here & right, other=0.0).to(tl.float32)
            s20 += g * tl.load(x + (WIDTH - 1) * CHANNELS, mask=below & left, other=0.0).to(
                tl.float32
            )
            s21 += g * tl.load(x + WIDTH * CHANNELS, mask=below, other=0.0).to(tl.float32)
            s22 += g * tl.load(x + (WIDTH + 1) * CHANNELS, mask=below & right, other=0.0).to(
                tl.float32
            )
        goal = parts + tl.program_id(0) * CHANNELS * 9 + channel * 9
        tl.store(goal, tl.sum(s00, axis=0), mask=real)
        tl.store(goal + 1, tl.sum(s01, axis=0), mask=real)
        tl.store(goal + 2, tl.sum(s02, axis=0), mask=real)
        tl.store(goal + 3, tl.sum(s10, axis=0), mask=real)
        tl.store(goal + 4, tl.sum(s11, axis=0), mask=real)
        tl.store(goal + 5, tl.sum(s12, axis=0), mask=real)
        tl.store(goal + 6, tl.sum(s20, axis=0), mask=real)
        tl.store(goal + 7, tl.sum(s21, axis=0), mask=real)
        tl.store(goal + 8, tl.sum(s22, axis=0), mask=real)


def out_size(size: int, stride: int) -> int:
    """Return the height or width of a map behind a 3x3 convolution with zeros around."""
    return (size - 1) // stride + 1


def _sizes(shape: torch.Size, stride: int) -> dict[str, int]:
    """Return what the kernels are made for; the input is [N, C, H, W]."""
    _, channels, height, width = shape
    return {
        "HEIGHT": height,
        "WIDTH": width,
        "OUT_HEIGHT": out_size(height, stride),
        "OUT_WIDTH": out_size(width, stride),
        "CHANNELS": channels,
        "STRIDE": stride,
        "BLOCK": POSITIONS,
        "BLOCK_CHANNELS": min(MOST_CHANNELS, triton.next_power_of_2(channels)),
    }


def _grid(positions: int, sizes: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(positions, sizes["BLOCK"]), triton.cdiv(
        sizes["CHANNELS"], sizes["BLOCK_CHANNELS"]
    )


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _made(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(
        shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _out_shape(inputs: Tensor, stride: int) -> tuple[int, int, int, int]:
    count, channels, height, width = inputs.shape
    return count, channels, out_size(height, stride), out_size(width, stride)


_working: dict[torch.device, bool] = {}


def prepare(device: torch.device) -> None:
    """Find out once whether the kernels can be compiled for a device; warn if not.

    Before this call, and if it fails, `takes` returns False.
    """
    device = torch.zeros(0, device=device).device  # with its number
    if device in _working or device.type != "cuda":
        return

    def run() -> bool:
        if not INSTALLED:
            raise RuntimeError("Triton is not installed")
        example = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=device)
        zeros = joined(example, example.new_zeros(1, 1, 3, 3), None, stride=1)
        return bool(zeros.eq(0).all())

    otherwise = "depthwise convolutions: no custom kernels here, slower"
    _working[device] = attempt(run, otherwise=otherwise, errors=Exception) or False


def takes(inputs: Tensor) -> bool:
    """Whether these kernels can convolve such inputs here."""
    return (
        inputs.is_cuda and _working.get(inputs.device, False) and 0 < inputs.numel() <= MOST_NUMBERS
    )


def joined(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int, most: float | None = None
) -> Tensor:
    """Convolve, add a bias [C] and cut to between 0 and `most`, in one kernel; for predictions."""
    inputs, weight = _last(inputs), weight.contiguous()
    outputs = _made(_out_shape(inputs, stride), inputs)
    sizes = _sizes(inputs.shape, stride)
    positions = outputs.numel() // outputs.shape[1]
    with torch.cuda.device_of(inputs):  # Triton launches on the current one
        _convolve[_grid(positions, sizes)](
            inputs,
            weight,
            weight if bias is None else bias,
            outputs,
            positions,
            0.0 if most is None else float(most),
            HAS_BIAS=bias is not None,
            CUTS=most is not None,
            **sizes,
        )
    return outputs


@torch.library.custom_op("fedaux::depthwise", mutates_args=())
def depthwise(inputs: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Convolve each channel of [N, C, H, W] with its 3x3 kernel of [C, 1, 3, 3], zero padding."""
    return joined(inputs, weight, None, stride=stride)


@depthwise.register_fake
def _(inputs: Tensor, weight: Tensor, stride: int) -> Tensor:
    return _made(_out_shape(inputs, stride), inputs)


@torch.library.custom_op("fedaux::depthwise_backward", mutates_args=())
def depthwise_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients of inputs and weight; sums always have the same order."""
    gradient, inputs, weight = _last(gradient), _last(inputs), weight.contiguous()
    sizes = _sizes(inputs.shape, stride)
    to_inputs = _made(tuple(inputs.shape), inputs)
    back = inputs.numel() // inputs.shape[1]
    positions = gradient.numel() // gradient.shape[1]
    fewer = sizes | {"BLOCK": POSITIONS // 2}
    blocks, strips = _grid(positions, fewer)
    share = triton.cdiv(blocks, max(1, PROGRAMS // strips)) * fewer["BLOCK"]
    programs = triton.cdiv(positions, share)
    parts = torch.empty((programs, *weight.shape), dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(inputs):
        _back_to_inputs[_grid(back, sizes)](gradient, weight, to_inputs, back, **sizes)
        _back_to_weight[(programs, strips)](gradient, inputs, parts, positions, share, **fewer)
    return to_inputs, parts.sum(dim=0).to(weight.dtype)


@depthwise_backward.register_fake
def _(gradient: Tensor, inputs: Tensor, weight: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return _made(tuple(inputs.shape), inputs), torch.empty(
        weight.shape, dtype=weight.dtype, device=weight.device
    )


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.stride = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    to_inputs, to_weight = depthwise_backward(gradient, *ctx.saved_tensors, ctx.stride)
    return to_inputs, to_weight, None


depthwise.register_autograd(_backward, setup_context=_remember)
