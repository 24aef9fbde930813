"""What kernels of a training step share: clients side by side, sums, and the way back through a
ReLU.

Everything of a client lies behind that of the one before it: activations are [clients,
padded_batch, H, W, C] (NHWC), weights [clients, OUT, kh, kw, C], sums [clients, rows, C].
`padded_batch` images have a place; `sizes[client]` says how many there are in this step. The
programs of a client without any exit at once and change nothing; a smaller batch counts its rows
alone.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

LOOSE = [
    "padded_batch",
    "tiles",
    "splits",
    "per_split",
    "area",
    "capacity",
    "classes",
    "bias_stride",
    "count",
    "clients",
    "batch",
    "layers",
    "more",
]
"""Arguments whose value should not lead to another compilation."""
EARLY = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
"""Whether a kernel is launched before the one it waits for has ended (programmatic dependent
launch)."""


@triton.jit
def wait():
    """Wait until the kernel before has ended, since this one may run already, and let the next
    one be launched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def client_of(sizes, tiles):
    """Return client, tile and batch size of a program, whose first axis goes over clients and
    their tiles."""
    program = tl.program_id(0)
    client = program // tiles
    return client, program - client * tiles, tl.load(sizes + client)


@triton.jit
def add(sums, c, C, values, row: tl.constexpr):
    """Add values [channels] to a row of sums; in any order, so that the last bits can differ
    from run to run."""
    tl.atomic_add(sums + row * C + c, values, sem="relaxed")


@triton.jit
def tail(
    acc,
    off,
    c,
    valid,
    C,
    out,
    res,
    z,
    coef,
    h,
    zs,
    RES: tl.constexpr,
    BY_H: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Let the gradient [channels, positions] that arrives at relu(...) through it, and store it.

    Returns its sums over positions, the sums of it times z, and (SECOND) times zs. RES adds another
    gradient first. What passes is where h > 0 (BY_H), or where z, normalised by coef, is.
    """
    if RES:
        acc += tl.load(res + off, mask=valid, other=0.0).to(tl.float32)
    zf = tl.load(z + off, mask=valid, other=0.0).to(tl.float32)
    if BY_H:
        on = tl.load(h + off, mask=valid, other=0.0).to(tl.float32) > 0
    else:
        on = zf * tl.load(coef + c)[:, None] + tl.load(coef + C + c)[:, None] > 0
    d = tl.where(on & valid, acc, 0.0).to(out.dtype.element_ty)
    tl.store(out + off, d, mask=valid)
    df = d.to(tl.float32)
    one = tl.sum(df, 1)
    two = tl.sum(df * zf, 1)
    three = two
    if SECOND:
        three = tl.sum(df * tl.load(zs + off, mask=valid, other=0.0).to(tl.float32), 1)
    return one, two, three


@triton.jit
def add_three(sums, c, C, one, two, three, SECOND: tl.constexpr):
    """Add what `tail` returned to its sums."""
    add(sums, c, C, one, 0)
    add(sums, c, C, two, 1)
    if SECOND:
        add(sums, c, C, three, 2)
