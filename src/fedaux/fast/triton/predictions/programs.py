"""The kernels: pointwise products, depthwise convolutions joined with the product behind them,
whole blocks and units.

Activations are rows [positions, C], an image's positions behind each other (NHWC). Weights come as
steps pack them: normalisation inside, matrices [C, OUT] filled up with zeros to whole blocks, taps
[9, C]. Sums are in single precision. Places are counted in 32 bits.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOOSE = ["positions"]
"""Arguments whose value should not lead to another compilation."""


@triton.jit
def cut(values, CUT: tl.constexpr):
    """Apply ReLU or ReLU6, in which what is not a number stays so."""
    if CUT != "":
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if CUT == "relu6":
        values = tl.minimum(values, 6.0, propagate_nan=tl.PropagateNan.ALL)
    return values


@triton.jit
def saturated(values, real, bias):
    """Return values + real * bias, cut to between 0 and 1 by the addition itself; what is not a
    number becomes 0."""
    if INTERPRETED:
        sums = values + real * bias
        sums = tl.where(sums == sums, tl.minimum(tl.maximum(sums, 0.0), 1.0), 0.0)
    else:
        sums = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $2, $3, $1;",
            "=f,f,f,f",
            [values, real, bias],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return sums


@triton.jit
def place_of(OUT: tl.constexpr, BLOCK_OUT: tl.constexpr):
    """Return the tile of positions and the channels of a program; those of one tile run next to
    each other."""
    BLOCKS: tl.constexpr = (OUT + BLOCK_OUT - 1) // BLOCK_OUT
    program = tl.program_id(0)
    return program // BLOCKS, (program % BLOCKS) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)


@triton.jit
def position(place, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Return image, row and column of positions."""
    return place // (HEIGHT * WIDTH), (place // WIDTH) % HEIGHT, place % WIDTH


@triton.jit
def at_tap(
    image, row, column, i, j, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr
):
    """Return the positions of the input that a tap sees, and whether they are inside the image."""
    y = row * STRIDE + i - 1
    x = column * STRIDE + j - 1
    return (image * HEIGHT + y) * WIDTH + x, (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)


@triton.jit
def rows_of(x, place, inside, channel, C: tl.constexpr, WHOLE: tl.constexpr):
    """Load [positions, channels], zeros outside; WHOLE: each of these channels exists."""
    there = inside[:, None] if WHOLE else inside[:, None] & (channel < C)[None, :]
    return tl.load(x + (place * C)[:, None] + channel[None, :], mask=there, other=0.0)


@triton.jit
def add_taps(
    total, x, taps, image, row, column, here, channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    FILLED: tl.constexpr,
):  # fmt: skip
    """Add the 3x3 taps of each channel to [positions, channels]; FILLED 0: what they see,
    unweighted.

    Rows are a true loop: what is behind it the compiler does not move in front of the loads, where
    each of nine maps would be laid out for the product and not their sum.
    """
    for i in tl.range(3):
        for j in tl.static_range(3):
            seen, inside = at_tap(image, row, column, i, j, HEIGHT, WIDTH, STRIDE)
            rows = rows_of(x, seen, inside & here, channel, C, WHOLE).to(tl.float32)
            if FILLED > 0:
                rows *= tl.load(taps + (i * 3 + j) * FILLED + channel).to(tl.float32)[None, :]
            total += rows
    return total


@triton.jit
def averaged(values, POSITIONS: tl.constexpr, AREA: tl.constexpr):
    """Return the means [images, channels] over the positions of each image."""
    sums = tl.sum(tl.reshape(values, (POSITIONS // AREA, AREA, values.shape[1])), axis=1)
    return sums * (1.0 / AREA)


@triton.jit(do_not_specialize=LOOSE)
def pointwise(
    x, weight, bias, out, positions,
    C: tl.constexpr, OUT: tl.constexpr, FILLED_OUT: tl.constexpr, CUT: tl.constexpr,
    AREA: tl.constexpr, BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """out[p, o] = cut(bias[o] + sum over c); AREA: the mean of so many positions, an image's,
    instead of each."""
    tile, o = place_of(OUT, BLOCK_OUT)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    here = place < positions
    total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    for k in tl.range(0, C, BLOCK_IN):
        channel = k + tl.arange(0, BLOCK_IN)
        rows = rows_of(x, place, here, channel, C, C % BLOCK_IN == 0)
        w = tl.load(weight + channel[:, None] * FILLED_OUT + o[None, :])
        total = tl.dot(rows, w, total, input_precision="ieee")
    total = cut(total + tl.load(bias + o)[None, :], CUT)
    if AREA > 0:
        image = tile * (BLOCK // AREA) + tl.arange(0, BLOCK // AREA)
        there = (image < positions // AREA)[:, None] & (o < OUT)[None, :]
        means = averaged(total, BLOCK, AREA)
        tl.store(
            out + image[:, None] * OUT + o[None, :], means.to(out.dtype.element_ty), mask=there
        )
    else:
        there = here[:, None] & (o < OUT)[None, :]
        tl.store(
            out + (place * OUT)[:, None] + o[None, :], total.to(out.dtype.element_ty), mask=there
        )


@triton.jit(do_not_specialize=LOOSE)
def depthwise_pointwise(
    x, taps, between, weight, bias, short, out, positions,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, FILLED: tl.constexpr, FILLED_OUT: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_IN: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """The second half of an inverted residual: taps of each channel, ReLU6, a product; ADDS:
    plus the block's input."""
    tile, o = place_of(OUT, BLOCK_OUT)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    here = place < positions
    image, row, column = position(place, OUT_HEIGHT, OUT_WIDTH)
    total = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
    for k in tl.range(0, C, BLOCK_IN):
        channel = k + tl.arange(0, BLOCK_IN)
        inner = tl.zeros((BLOCK, BLOCK_IN), tl.float32) + tl.load(between + channel)[None, :]
        inner = add_taps(
            inner,
            x,
            taps,
            image,
            row,
            column,
            here,
            channel,
            HEIGHT,
            WIDTH,
            STRIDE,
            C,
            C % BLOCK_IN == 0,
            FILLED,
        )
        inner = cut(inner, "relu6").to(x.dtype.element_ty)
        w = tl.load(weight + channel[:, None] * FILLED_OUT + o[None, :])
        total = tl.dot(inner, w, total, input_precision="ieee")
    total += tl.load(bias + o)[None, :]
    at = (place * OUT)[:, None] + o[None, :]
    there = here[:, None] & (o < OUT)[None, :]
    if ADDS:
        total += tl.load(short + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=LOOSE)
def inverted_residual(
    x, expand, expand_bias, taps, between, weight, bias, out, positions,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    C: tl.constexpr, HIDDEN: tl.constexpr, OUT: tl.constexpr,
    FILLED: tl.constexpr, FILLED_HIDDEN: tl.constexpr, FILLED_OUT: tl.constexpr,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
):  # fmt: skip
    """A whole inverted residual, whose wide map is nowhere written: each tap expands the positions
    that it sees.

    Weights are such that ReLU6 is a cut at 1, which an addition does by itself, but which makes 0
    of what is not a number; so such inputs are looked for, and such weights have gone into the last
    bias. Only what is born inside from numbers, as infinity less infinity, is not seen.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, FILLED)
    o = tl.arange(0, FILLED_OUT)
    here = place < positions
    image, row, column = position(place, OUT_HEIGHT, OUT_WIDTH)
    total = tl.zeros((BLOCK, FILLED_OUT), tl.float32)
    for h in tl.range(0, HIDDEN, BLOCK_HIDDEN):
        hidden = h + tl.arange(0, BLOCK_HIDDEN)
        w = tl.load(expand + channel[:, None] * FILLED_HIDDEN + hidden[None, :])
        b = tl.load(expand_bias + hidden)[None, :]
        inner = tl.zeros((BLOCK, BLOCK_HIDDEN), tl.float32) + tl.load(between + hidden)[None, :]
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                seen, inside = at_tap(image, row, column, i, j, HEIGHT, WIDTH, STRIDE)
                rows = rows_of(x, seen, inside & here, channel, C, C == FILLED)
                wide = tl.dot(rows, w, input_precision="ieee")
                real = inside.to(tl.float32)[:, None]  # outside the sum is 0, and so is its ReLU6
                tap = tl.load(taps + (i * 3 + j) * FILLED_HIDDEN + hidden).to(tl.float32)[None, :]
                inner += saturated(wide, real, b) * tap
        inner = saturated(inner, 0.0, 0.0)
        w = tl.load(weight + hidden[:, None] * FILLED_OUT + o[None, :])
        total = tl.dot(inner.to(x.dtype.element_ty), w, total, input_precision="ieee")
    total += tl.load(bias + o)[None, :]
    at = (place * OUT)[:, None] + o[None, :]
    there = here[:, None] & (o < OUT)[None, :]
    if ADDS:
        total += tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    else:
        lost = tl.zeros((BLOCK, FILLED), tl.float32)
        for i in tl.static_range(STRIDE):
            for j in tl.static_range(STRIDE):  # every position is seen by one of these taps
                seen, inside = at_tap(image, row, column, i + 1, j + 1, HEIGHT, WIDTH, STRIDE)
                rows = rows_of(x, seen, inside & here, channel, C, C == FILLED).to(tl.float32)
                lost += tl.where(rows == rows, 0.0, 1.0)
        total = tl.where((tl.max(lost, axis=1) > 0)[:, None], float("nan"), total)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _store(
    values, o, real, out, place, here, tile, positions, OUT: tl.constexpr, AREA: tl.constexpr
):
    """Store a block of a unit's channels, those that are real, or their means over each image."""
    if AREA > 0:
        BLOCK: tl.constexpr = values.shape[0]
        image = tile * (BLOCK // AREA) + tl.arange(0, BLOCK // AREA)
        there = (image < positions // AREA)[:, None] & real[None, :]
        means = averaged(values.to(tl.float32), BLOCK, AREA)
        tl.store(
            out + image[:, None] * OUT + o[None, :], means.to(out.dtype.element_ty), mask=there
        )
    else:
        tl.store(
            out + (place * OUT)[:, None] + o[None, :], values, mask=here[:, None] & real[None, :]
        )


@triton.jit
def _store_next(follow, bias, out, column, place, here, WIDTH: tl.constexpr):
    """Add the bias to hidden channels of the next unit, cut and store them."""
    follow = cut(follow + tl.load(bias + column)[None, :], "relu").to(out.dtype.element_ty)
    tl.store(out + (place * WIDTH)[:, None] + column[None, :], follow, mask=here[:, None])


@triton.jit(do_not_specialize=LOOSE)
def shuffle_unit(
    x, taps, weight, bias, short, out, following, following_bias, next_out, positions,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT_HEIGHT: tl.constexpr, OUT_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    QUARTER: tl.constexpr, OUT: tl.constexpr, POOLED: tl.constexpr, FILLED_HALF: tl.constexpr,
    NEXT_QUARTER: tl.constexpr, AREA: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """A ShuffleNet unit behind its first product, and the first product of the next unit, which
    need not read it again.

    Taps of each channel, a product, the shortcut (POOLED: so many channels of means over 3x3
    positions come before instead), ReLU; then the next unit's product and its ReLU into `next_out`
    (NEXT_QUARTER 0: there is none). Hidden channels lie in four quarters: for each group of the
    product behind them, those from either group before.
    """
    tile = tl.program_id(0)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    here = place < positions
    image, row, column = position(place, OUT_HEIGHT, OUT_WIDTH)
    HALF: tl.constexpr = (OUT - POOLED) // 2
    C: tl.constexpr = 4 * QUARTER
    # Groups of the next product are those of this one, unless pooled channels have moved them.
    NEXT: tl.constexpr = NEXT_QUARTER * (2 if POOLED == 0 else 4)
    n = tl.arange(0, NEXT if NEXT > 0 else 16)
    follow = tl.zeros((BLOCK, NEXT if NEXT > 0 else 16), tl.float32)
    if POOLED > 0:
        for first in tl.range(0, POOLED, BLOCK_OUT):
            c = first + tl.arange(0, BLOCK_OUT)
            sums = tl.zeros((BLOCK, BLOCK_OUT), tl.float32)
            sums = add_taps(
                sums, short, taps, image, row, column, here, c,
                HEIGHT, WIDTH, STRIDE, POOLED, POOLED % BLOCK_OUT == 0, 0,
            )  # fmt: skip
            pooled = (sums * (1.0 / 9.0)).to(x.dtype.element_ty)
            _store(pooled, c, c < POOLED, out, place, here, tile, positions, OUT, AREA)
            if NEXT > 0:
                v = tl.load(following + c[:, None] * NEXT + n[None, :])
                follow = tl.dot(pooled, v, follow, input_precision="ieee")
    for group in tl.static_range(2):
        channel = group * (2 * QUARTER) + tl.arange(0, 2 * QUARTER)
        inner = tl.zeros((BLOCK, 2 * QUARTER), tl.float32)
        inner = add_taps(
            inner, x, taps, image, row, column, here, channel, HEIGHT, WIDTH, STRIDE, C, True, C
        )
        narrow = inner.to(x.dtype.element_ty)
        for first in tl.range(0, HALF, BLOCK_OUT):
            local = first + tl.arange(0, BLOCK_OUT)
            o = POOLED + group * HALF + local
            w = tl.load(weight + channel[:, None] * FILLED_HALF + local[None, :])
            values = tl.dot(narrow, w, input_precision="ieee")
            values += tl.load(bias + group * FILLED_HALF + local)[None, :]
            if POOLED == 0:
                there = here[:, None] & (local < HALF)[None, :]
                values += tl.load(
                    short + (place * OUT)[:, None] + o[None, :], mask=there, other=0.0
                ).to(tl.float32)
            block = cut(values, "relu").to(x.dtype.element_ty)
            _store(block, o, local < HALF, out, place, here, tile, positions, OUT, AREA)
            if NEXT > 0:
                v = tl.load(following + o[:, None] * NEXT + n[None, :])
                follow = tl.dot(block, v, follow, input_precision="ieee")
        if POOLED == 0 and NEXT > 0:
            goal = (
                (n // NEXT_QUARTER) * (2 * NEXT_QUARTER) + group * NEXT_QUARTER + n % NEXT_QUARTER
            )
            _store_next(follow, following_bias, next_out, goal, place, here, 4 * NEXT_QUARTER)
            follow = tl.zeros((BLOCK, NEXT), tl.float32)
    if POOLED > 0 and NEXT > 0:
        _store_next(follow, following_bias, next_out, n, place, here, 4 * NEXT_QUARTER)
