"""The first convolution of several clients, whose few channels are no matrix: it is made of
patches of the images."""

from __future__ import annotations

import triton
import triton.language as tl

from fedaux.fast.triton.common import LOOSE, add, client_of, wait
from fedaux.fast.triton.normalisation import through


@triton.jit
def _patches(
    image, mean, deviation, p, k, sc, sy, sx, H: tl.constexpr, W: tl.constexpr, CH: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Return the 3x3 patches [positions, 32] in the order (tap, channel), zero outside; bytes
    are normalised."""
    tap = k // CH
    ch = k - tap * CH
    yy = (p // W)[:, None] + (tap // 3)[None, :] - 1
    xx = (p % W)[:, None] + (tap % 3)[None, :] - 1
    inside = (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W) & (k < 9 * CH)[None, :]
    value = tl.load(image + ch[None, :] * sc + yy * sy + xx * sx, mask=inside, other=0).to(
        tl.float32
    )
    if BYTES:
        real = k < 9 * CH
        value = value / 255.0 - tl.load(mean + ch, mask=real, other=0.0)[None, :]
        value = tl.where(
            inside, value / tl.load(deviation + ch, mask=real, other=1.0)[None, :], 0.0
        )
    return value


@triton.jit
def _image(images, rows, starts, client, n, capacity, sn):
    """Return the address of the n-th image of a client's batch."""
    return images + tl.load(rows + client * capacity + tl.load(starts + client) + n) * sn


@triton.jit(do_not_specialize=LOOSE)
def stem_fwd(
    images, rows, starts, mean, deviation, w, z, sums, sizes, capacity, padded_batch, tiles, sn,
    sc, sy, sx, H: tl.constexpr,
    W: tl.constexpr, CH: tl.constexpr, OUT: tl.constexpr, BP: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """The first convolution, 3x3, as a product of patches of images with w [OUT, 9 CH], and sums
    of z and z^2."""
    wait()
    client, tile, size = client_of(sizes, tiles)
    n = tile * BP // (H * W)
    if n >= size:
        return
    p = tile * BP - n * (H * W) + tl.arange(0, BP)
    k = tl.arange(0, 32)
    o = tl.arange(0, OUT)
    image = _image(images, rows, starts, client, n, capacity, sn)
    a = _patches(image, mean, deviation, p, k, sc, sy, sx, H, W, CH, BYTES).to(w.dtype.element_ty)
    b = tl.load(
        w + client * (OUT * 9 * CH) + o[None, :] * (9 * CH) + k[:, None],
        mask=(k < 9 * CH)[:, None],
        other=0.0,
    )
    zb = tl.dot(a, b).to(z.dtype.element_ty)
    tl.store(z + ((client * padded_batch + n) * (H * W) + p)[:, None] * OUT + o[None, :], zb)
    zf = zb.to(tl.float32)
    sums += client * 2 * OUT
    add(sums, o, OUT, tl.sum(zf, 0), 0)
    add(sums, o, OUT, tl.sum(zf * zf, 0), 1)


@triton.jit(do_not_specialize=LOOSE)
def stem_wgrad(
    images, rows, starts, mean, deviation, d, dsums, z, coef, grad_gamma, grad_beta, grad, sizes,
    capacity, padded_batch, tiles,
    per_split, sn, sc, sy, sx, H: tl.constexpr, W: tl.constexpr, CH: tl.constexpr,
    OUT: tl.constexpr, BP: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Add a split's part to the first convolution's grad [clients, o, (tap, channel)], through
    its normalisation."""
    wait()
    client, split, size = client_of(sizes, tiles)
    if split * per_split >= size * (H * W):
        return
    k = tl.arange(0, 32)
    o = tl.arange(0, OUT)
    a, b, e = through(
        dsums + client * 2 * OUT,
        1,
        coef + client * 4 * OUT,
        grad_gamma + client * OUT,
        grad_beta + client * OUT,
        o,
        OUT,
        size,
        size * (H * W),
        split == 0,
    )
    acc = tl.zeros((OUT, 32), tl.float32)
    for p0 in range(split * per_split, tl.minimum((split + 1) * per_split, size * (H * W)), BP):
        n = p0 // (H * W)
        p = p0 - n * (H * W) + tl.arange(0, BP)
        off = ((client * padded_batch + n) * (H * W) + p)[:, None] * OUT + o[None, :]
        g = (
            tl.load(d + off).to(tl.float32) * a[None, :]
            + tl.load(z + off).to(tl.float32) * b[None, :]
            + e[None, :]
        )
        image = _image(images, rows, starts, client, n, capacity, sn)
        patches = _patches(image, mean, deviation, p, k, sc, sy, sx, H, W, CH, BYTES)
        acc = tl.dot(g.to(z.dtype.element_ty).T, patches.to(z.dtype.element_ty), acc)
    at = grad + client * (OUT * 9 * CH) + o[:, None] * (9 * CH) + k[None, :]
    tl.atomic_add(at, acc, mask=(k < 9 * CH)[None, :], sem="relaxed")
