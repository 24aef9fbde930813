"""Convolutions and their gradients for several clients, with the sums that batch normalisation
needs.

They are products [channels, positions] of boxes that bulk tensor copies put into shared memory: a
box [images, rows, width, channels] is a matrix as it lies, and pixels outside the image are zero by
the copy itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedaux.fast.triton.common import LOOSE, add, add_three, client_of, tail, wait


@triton.jit(do_not_specialize=LOOSE)
def conv_fwd(
    xd, wd, z, sums, sizes, padded_batch, tiles, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    OUT: tl.constexpr,
    KS: tl.constexpr, STRIDE: tl.constexpr, NB: tl.constexpr, HB: tl.constexpr, BO: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """z[position, o] = sum over taps and channels; sums of z and z^2 over positions. H, W are
    sides of the output."""
    wait()
    client, tile, size = client_of(sizes, tiles)
    BP: tl.constexpr = NB * HB * W
    KB: tl.constexpr = C // BK
    o0 = tl.program_id(1) * BO
    row = tile * (NB * HB)
    n = row // H
    y = row - n * H
    if n >= size:
        return
    image = client * padded_batch + n
    acc = tl.zeros((BO, BP), tl.float32)
    for it in range(KS * KS * KB):
        tap = it // KB
        k = (it - tap * KB) * BK
        dy = tap // KS + (3 - KS) // 2
        dx = tap % KS + (3 - KS) // 2
        w = wd.load([client * OUT + o0, tap * C + k])
        if STRIDE == 1:
            x = xd.load([image, y + dy - 1, dx - 1, k]).reshape(BP, BK)
        else:
            x = xd.load(
                [
                    image,
                    y + (dy + 1) // 2 - 1,
                    (dy + 1) % 2,
                    (dx + 1) // 2 - 1,
                    ((dx + 1) % 2) * C + k,
                ]
            ).reshape(BP, BK)
        acc = tl.dot(w, x.T, acc)
    o = o0 + tl.arange(0, BO)
    p = tile * BP + tl.arange(0, BP)
    valid = (p < size * (H * W))[None, :]
    zb = tl.where(valid, acc, 0.0).to(z.dtype.element_ty)
    tl.store(z + (client * padded_batch * (H * W) + p)[None, :] * OUT + o[:, None], zb, mask=valid)
    zf = zb.to(tl.float32)
    sums += client * 2 * OUT
    add(sums, o, OUT, tl.sum(zf, 1), 0)
    add(sums, o, OUT, tl.sum(zf * zf, 1), 1)


@triton.jit(do_not_specialize=LOOSE)
def conv_dgrad(
    gd, wd, gsd, wsd, out, res, z, coef, h, zs, sums, sizes, padded_batch, tiles, H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr, STRIDE: tl.constexpr, SHORT: tl.constexpr,
    NB: tl.constexpr, HB: tl.constexpr,
    BI: tl.constexpr, BK: tl.constexpr, RES: tl.constexpr, BY_H: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Input gradient of a 3x3 convolution [+ that of the 1x1 shortcut beside it], then `tail`.

    H, W belong to g, the output's gradient.
    """
    wait()
    client, tile, size = client_of(sizes, tiles)
    BP: tl.constexpr = NB * HB * W
    KB: tl.constexpr = OUT // BK
    i0 = tl.program_id(1) * BI
    row = tile * (NB * HB)
    n = row // H
    y = row - n * H
    if n >= size:
        return
    image = client * padded_batch + n
    acc = tl.zeros((BI, BP), tl.float32)
    p = tile * BP + tl.arange(0, BP)
    c = i0 + tl.arange(0, BI)
    if STRIDE == 1:
        for it in range(9 * KB):
            tap = it // KB
            k = (it - tap * KB) * BK
            dy = tap // 3
            dx = tap % 3
            w = wd.load([client * OUT + k, tap * C + i0])
            g = gd.load([image, y + 1 - dy, 1 - dx, k]).reshape(BP, BK)
            acc = tl.dot(w.T, g.T, acc)
        q = client * padded_batch * (H * W) + p
    else:
        # Inputs of one parity of row and column see the same taps: 4, 2, 2 or 1 of the nine.
        kind = 3 - tl.program_id(2)
        py = kind // 2
        px = kind % 2
        for it in range((1 + py) * (1 + px) * KB):
            t = it // KB
            k = (it - t * KB) * BK
            ty = t // (1 + px)
            tx = t - ty * (1 + px)
            dy = 1 - py + 2 * ty * py
            dx = 1 - px + 2 * tx * px
            w = wd.load([client * OUT + k, (dy * 3 + dx) * C + i0])
            g = gd.load([image, y + py * (1 - ty), px * (1 - tx), k]).reshape(BP, BK)
            acc = tl.dot(w.T, g.T, acc)
        if SHORT:
            for kb in range(tl.where(kind == 0, KB, 0)):
                ws = wsd.load([client * OUT + kb * BK, i0])
                gs = gsd.load([image, y, 0, kb * BK]).reshape(BP, BK)
                acc = tl.dot(ws.T, gs.T, acc)
        pn = p // (H * W)
        rest = p - pn * (H * W)
        yy = rest // W
        q = (((client * padded_batch + pn) * H + yy) * 2 + py) * (2 * W) + 2 * (rest - yy * W) + px
    valid = (p < size * (H * W))[None, :]
    one, two, three = tail(
        acc,
        q[None, :] * C + c[:, None],
        c,
        valid,
        C,
        out,
        res,
        z,
        coef + client * 4 * C,
        h,
        zs,
        RES,
        BY_H,
        SECOND,
    )
    add_three(sums + client * (3 if SECOND else 2) * C, c, C, one, two, three, SECOND)


@triton.jit(do_not_specialize=LOOSE)
def conv_wgrad(
    gd, hd, part, sizes, padded_batch, splits, per_split, H: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, OUT: tl.constexpr,
    KS: tl.constexpr, STRIDE: tl.constexpr, NB: tl.constexpr, HB: tl.constexpr, BO: tl.constexpr,
    BI: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """part[client, split, o, tap, i] = sum over a split's positions of g[position, o] x[position at
    tap, i].

    TAPS = 3 takes a row of taps at once. Grid: clients and their splits, tiles of o, taps and tiles
    of i. Rows beyond the batch are zero in g and x.
    """
    wait()
    client, split, size = client_of(sizes, splits)
    if size == 0:
        return
    BP: tl.constexpr = NB * HB * W
    NI: tl.constexpr = C // BI
    o0 = tl.program_id(1) * BO
    first = tl.program_id(2) // NI * TAPS
    i0 = tl.program_id(2) % NI * BI
    dy = first // KS + (3 - KS) // 2
    dx = first % KS + (3 - KS) // 2
    acc0 = tl.zeros((BO, BI), tl.float32)
    if TAPS == 3:
        acc1 = tl.zeros((BO, BI), tl.float32)
        acc2 = tl.zeros((BO, BI), tl.float32)
    for row in range(split * per_split, tl.minimum((split + 1) * per_split, size * H), NB * HB):
        n = row // H
        y = row - n * H
        image = client * padded_batch + n
        g = gd.load([(image * H + y) * W, o0])
        if STRIDE == 1:
            h0 = hd.load([image, y + dy - 1, dx - 1, i0]).reshape(BP, BI)
            acc0 = tl.dot(g.T, h0, acc0)
            if TAPS == 3:
                h1 = hd.load([image, y + dy - 1, 0, i0]).reshape(BP, BI)
                acc1 = tl.dot(g.T, h1, acc1)
                h2 = hd.load([image, y + dy - 1, 1, i0]).reshape(BP, BI)
                acc2 = tl.dot(g.T, h2, acc2)
        else:
            yy = y + (dy + 1) // 2 - 1
            py = (dy + 1) % 2
            h0 = hd.load([image, yy, py, (dx + 1) // 2 - 1, ((dx + 1) % 2) * C + i0]).reshape(
                BP, BI
            )
            acc0 = tl.dot(g.T, h0, acc0)
            if TAPS == 3:
                h1 = hd.load([image, yy, py, 0, i0]).reshape(BP, BI)
                acc1 = tl.dot(g.T, h1, acc1)
                h2 = hd.load([image, yy, py, 0, C + i0]).reshape(BP, BI)
                acc2 = tl.dot(g.T, h2, acc2)
    o = o0 + tl.arange(0, BO)
    i = i0 + tl.arange(0, BI)
    at = (
        part
        + (client * splits + split) * (OUT * KS * KS * C)
        + o[:, None] * (KS * KS * C)
        + first * C
        + i[None, :]
    )
    tl.store(at, acc0)
    if TAPS == 3:
        tl.store(at + C, acc1)
        tl.store(at + 2 * C, acc2)
