"""Where a step of several clients begins and ends: whose turn it is, the head with its loss, and
Adam."""

from __future__ import annotations

import triton
import triton.language as tl

from fedaux.fast.triton.common import LOOSE, add_three, client_of, tail, wait


@triton.jit(do_not_specialize=LOOSE)
def advance(
    sums, count, gradients, more, rows_of, epoch_len, following, starts, sizes, steps, tracked,
    corrections, clients, batch,
    layers, LOG1: tl.constexpr, LOG2: tl.constexpr, KP: tl.constexpr, LP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Begin a step: all sums are zero, and every client's next `batch` rows are its batch, or what
    is left of them.

    Client k has `rows_of[k]` rows; batches end at multiples of `epoch_len[k]`. The first `more` of the gradients, those of the first convolution, are sums, too.

    A client with rows counts a step (`steps`, for Adam, with corrections [clients, 2]: 1 - b1^t and
    sqrt(1 - b2^t)), one with more than one row also a batch of its statistics (`tracked` [layers,
    clients]).
    """
    wait()
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + e, tl.zeros((BLOCK,), tl.float32), mask=e < count)
    tl.store(gradients + e, tl.zeros((BLOCK,), tl.float32), mask=e < more)
    if tl.program_id(0) == 0:
        k = tl.arange(0, KP)
        real = k < clients
        start = tl.load(following + k, mask=real, other=0)
        turn = tl.maximum(tl.load(epoch_len + k, mask=real, other=1), 1)
        left = tl.minimum(tl.load(rows_of + k, mask=real, other=0) - start, turn - start % turn)
        size = tl.minimum(tl.maximum(left, 0), batch)
        step = tl.load(steps + k, mask=real, other=0) + (size > 0).to(tl.int32)
        t = tl.maximum(step, 1).to(tl.float64)
        tl.store(starts + k, start, mask=real)
        tl.store(following + k, start + size, mask=real)
        tl.store(sizes + k, size, mask=real)
        tl.store(steps + k, step, mask=real)
        layer = tl.arange(0, LP)
        at = tracked + layer[:, None] * clients + k[None, :]
        there = (layer < layers)[:, None] & real[None, :]
        tl.store(
            at, tl.load(at, mask=there, other=0) + (size > 1).to(tl.int64)[None, :], mask=there
        )
        tl.store(corrections + 2 * k, (1.0 - tl.exp(t * LOG1)).to(tl.float32), mask=real)
        tl.store(corrections + 2 * k + 1, tl.sqrt(1.0 - tl.exp(t * LOG2)).to(tl.float32), mask=real)


@triton.jit(do_not_specialize=LOOSE)
def head(
    h, z, zs, weight, bias, targets, rows, starts, features, errors, total, d, sums, sizes,
    adjustment, beliefs, private, capacity, padded_batch, classes,
    bias_stride, F: tl.constexpr, AREA: tl.constexpr, CP: tl.constexpr, BF: tl.constexpr,
    SOFT: tl.constexpr, ADJUSTED: tl.constexpr, REHEARSED: tl.constexpr,
):  # fmt: skip
    """From the last block's h to the gradient before its ReLU, one image a program: mean, logits,
    loss, and back.

    The loss is cross entropy with labels [n], or (SOFT) D_KL(targets || softmax) with targets [n,
    classes]; `total` takes its sum. With ADJUSTED, logits of private rows are multiplied and
    shifted by the client's adjustment [2, CP]. The last REHEARSED rows of a batch are public: rows
    from `private` on, with soft labels in `beliefs` [M, classes]. Features [clients, padded_batch, F] and errors, the gradients
    of logits [clients, padded_batch, CP], are kept for `head_wgrad`.
    """
    wait()
    client, n, size = client_of(sizes, padded_batch)
    if n >= size:
        return
    image = client * padded_batch + n
    row = tl.load(rows + client * capacity + tl.load(starts + client) + n)
    weight += client * classes * F
    c = tl.arange(0, CP)
    real = c < classes
    a = image * AREA + tl.arange(0, AREA)
    logits = tl.load(bias + client * bias_stride + c, mask=real, other=0.0)
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        mean = tl.sum(tl.load(h + a[None, :] * F + f[:, None]).to(tl.float32), 1) / AREA
        tl.store(features + image * F + f, mean)
        logits += tl.sum(
            tl.load(weight + c[:, None] * F + f[None, :], mask=real[:, None], other=0.0)
            * mean[None, :],
            1,
        )
    count = size - REHEARSED
    public = n >= count
    scale = tl.full((CP,), 1.0, tl.float32)
    if ADJUSTED:
        own = adjustment + client * 2 * CP + c
        scale = tl.where(public, 1.0, tl.load(own))
        logits = logits * scale + tl.where(public, 0.0, tl.load(own + CP))
    logits = tl.where(real, logits, -float("inf"))
    logits -= tl.max(logits, 0)
    odds = tl.exp(logits)
    log_probability = tl.where(real, logits - tl.log(tl.sum(odds, 0)), 0.0)
    if SOFT:
        target = tl.load(targets + row * classes + c, mask=real, other=0.0)
        value = tl.sum(target * (tl.log(tl.where(target > 0, target, 1.0)) - log_probability), 0)
    else:
        label = tl.load(targets + row, mask=row < private, other=-1)
        target = (c == label).to(tl.float32)
        share = 1.0 / count
        if REHEARSED > 0:
            believed = tl.load(
                beliefs + (row - private) * classes + c, mask=real & (row >= private), other=0.0
            )
            target = tl.where(public, believed, target)
            share = tl.where(public, 1.0 / REHEARSED, share)
        mass = tl.sum(target, 0)
        value = tl.sum(
            target * (tl.log(tl.where(target > 0, target / mass, 1.0)) - log_probability), 0
        ) * (share * count)
    if SOFT:
        share = 1.0 / count
    error = (odds / tl.sum(odds, 0) * tl.sum(target, 0) - target) * scale * share
    tl.store(errors + image * CP + c, error)
    tl.atomic_add(total + client, value, sem="relaxed")
    for f0 in range(0, F, BF):
        f = f0 + tl.arange(0, BF)
        by = (
            tl.sum(
                tl.load(weight + c[None, :] * F + f[:, None], mask=real[None, :], other=0.0)
                * error[None, :],
                1,
            )
            / AREA
        )
        acc = by[:, None] + tl.zeros((BF, AREA), tl.float32)
        off = a[None, :] * F + f[:, None]
        one, two, three = tail(acc, off, f, off >= 0, F, d, d, z, sums, h, zs, False, True, True)
        add_three(sums + client * 3 * F, f, F, one, two, three, True)


@triton.jit(do_not_specialize=LOOSE)
def head_wgrad(
    features, errors, grad_weight, grad_bias, sizes, padded_batch, tiles, classes, bias_stride,
    F: tl.constexpr,
    CP: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Gradients of the head: errors^T features [classes, F], and the sum of errors."""
    wait()
    client, tile, size = client_of(sizes, tiles)
    if size == 0:
        return
    c = tl.arange(0, CP)
    f = tile * BF + tl.arange(0, BF)
    acc = tl.zeros((CP, BF), tl.float32)
    total = tl.zeros((CP,), tl.float32)
    for r0 in range(0, size, BR):
        r = r0 + tl.arange(0, BR)
        valid = (r < size)[:, None]
        e = tl.load(
            errors + (client * padded_batch + r)[:, None] * CP + c[None, :], mask=valid, other=0.0
        )
        x = tl.load(
            features + (client * padded_batch + r)[:, None] * F + f[None, :], mask=valid, other=0.0
        )
        acc = tl.dot(e.T, x, acc, input_precision="ieee")
        total += tl.sum(e, 0)
    real = c < classes
    tl.store(
        grad_weight + client * classes * F + c[:, None] * F + f[None, :], acc, mask=real[:, None]
    )
    if tile == 0:
        tl.store(grad_bias + client * bias_stride + c, total, mask=real)


@triton.jit(do_not_specialize=LOOSE)
def adam(
    table, arena, params_fp32, anchor, first, second, params_bf16, corrections, rate, sizes,
    B1: tl.constexpr, B2: tl.constexpr,
    EPS: tl.constexpr, DECAY: tl.constexpr, PROXIMAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A step of Adam for all parameters of the clients that have one; leaves the weights in half
    precision, too.

    A line of the table is one block: where its gradient begins, how far the next client's is, where
    its parameter begins, how far the next client's is, elements, splits of the gradient, which are
    added, and its first element.
    """
    wait()
    client = tl.program_id(1)
    if tl.load(sizes + client) == 0:
        return
    line = table + tl.program_id(0) * 8
    size = tl.load(line + 4)
    splits = tl.load(line + 5)
    e = tl.load(line + 6) + tl.arange(0, BLOCK)
    mask = e < size
    source = arena + tl.load(line) + client * tl.load(line + 1)
    at = tl.load(line + 2) + client * tl.load(line + 3) + e
    m = tl.load(first + at, mask=mask, other=0.0)
    v = tl.load(second + at, mask=mask, other=0.0)
    p = tl.load(params_fp32 + at, mask=mask, other=0.0)
    g = tl.zeros((BLOCK,), tl.float32)
    for split in tl.range(splits, loop_unroll_factor=8):
        g += tl.load(source + split * size + e, mask=mask, other=0.0)
    if PROXIMAL > 0:
        g += PROXIMAL * (p - tl.load(anchor + at, mask=mask, other=0.0))
    if DECAY > 0:
        g += DECAY * p
    m = B1 * m + (1.0 - B1) * g
    v = B2 * v + (1.0 - B2) * g * g
    by1 = tl.load(corrections + 2 * client)
    by2 = tl.load(corrections + 2 * client + 1)
    p -= tl.load(rate) / by1 * m / (tl.sqrt(v) / by2 + EPS)
    tl.store(first + at, m, mask=mask)
    tl.store(second + at, v, mask=mask)
    tl.store(params_fp32 + at, p, mask=mask)
    tl.store(params_bf16 + at, p.to(params_bf16.dtype.element_ty), mask=mask)
