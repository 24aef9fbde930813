"""Batch normalisation of several clients: scale, shift and ReLU, running statistics, and the way
back."""

from __future__ import annotations

import triton
import triton.language as tl

from fedaux.fast.triton.common import LOOSE, client_of, wait


@triton.jit
def statistics(
    sums, gamma, beta, mean_run, var_run, coef, c, C, client, size, count, first, EPS: tl.constexpr,
    MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Return scale and shift of a batch normalisation from its sums.

    The first program keeps them (coef: scale, shift, mean, 1 / deviation) and moves the running
    statistics. A batch of one has no variance: the running statistics take its place, unchanged.
    """
    sums += client * 2 * C
    gamma += client * C
    beta += client * C
    mean_run += client * C
    var_run += client * C
    coef += client * 4 * C
    number = count.to(tl.float32)
    mean = tl.load(sums + c) / number
    var = tl.maximum(
        tl.load(sums + C + c) / number - mean * mean, 0.0, propagate_nan=tl.PropagateNan.ALL
    )
    if size == 1:
        mean = tl.load(mean_run + c)
        var = tl.load(var_run + c)
    rstd = 1.0 / tl.sqrt(var + EPS)
    scale = tl.load(gamma + c) * rstd
    shift = tl.load(beta + c) - mean * scale
    if first:
        tl.store(coef + c, scale)
        tl.store(coef + C + c, shift)
        tl.store(coef + 2 * C + c, mean)
        tl.store(coef + 3 * C + c, rstd)
        if size > 1:
            tl.store(mean_run + c, (1.0 - MOMENTUM) * tl.load(mean_run + c) + MOMENTUM * mean)
            tl.store(
                var_run + c,
                (1.0 - MOMENTUM) * tl.load(var_run + c)
                + MOMENTUM * var * (number / (number - 1.0)),
            )
    return scale, shift


@triton.jit(do_not_specialize=LOOSE)
def apply_fwd(
    z, sums, gamma, beta, mean_run, var_run, coef, zs, sums_s, gamma_s, beta_s, mean_run_s,
    var_run_s, coef_s, out,
    sizes, padded_batch, tiles, area, C: tl.constexpr, SHORT: tl.constexpr, BC: tl.constexpr,
    BR: tl.constexpr,
    EPS: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """out = relu(bn(z) [+ zs, SHORT 1] [+ bn(zs), SHORT 2]); zero beyond the batch."""
    wait()
    client, tile, size = client_of(sizes, tiles)
    if size == 0:
        return
    r = tile * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    off = (client * padded_batch * area + r)[:, None] * C + c[None, :]
    count = size * area
    valid = (r < count)[:, None]
    value = tl.load(z + off, mask=valid, other=0.0).to(tl.float32)
    if SHORT > 0:
        other = tl.load(zs + off, mask=valid, other=0.0).to(tl.float32)
    scale, shift = statistics(
        sums,
        gamma,
        beta,
        mean_run,
        var_run,
        coef,
        c,
        C,
        client,
        size,
        count,
        tile == 0,
        EPS,
        MOMENTUM,
    )
    value = value * scale[None, :] + shift[None, :]
    if SHORT == 1:
        value += other
    if SHORT == 2:
        scale_s, shift_s = statistics(
            sums_s,
            gamma_s,
            beta_s,
            mean_run_s,
            var_run_s,
            coef_s,
            c,
            C,
            client,
            size,
            count,
            tile == 0,
            EPS,
            MOMENTUM,
        )
        value += other * scale_s[None, :] + shift_s[None, :]
    value = tl.where(valid, tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL), 0.0)
    tl.store(out + off, value.to(out.dtype.element_ty), mask=(r < padded_batch * area)[:, None])


@triton.jit
def through(sums, second: tl.constexpr, coef, grad_gamma, grad_beta, c, C, size, count, first):
    """g = a d + b z + e through a batch normalisation, from sum d (row 0) and sum d z (row
    `second`).

    For a batch of one, whose statistics do not depend on it, g = a d.
    """
    d1 = tl.load(sums + c)
    d2 = tl.load(sums + second * C + c)
    a = tl.load(coef + c)
    mean = tl.load(coef + 2 * C + c)
    rstd = tl.load(coef + 3 * C + c)
    dgamma = rstd * (d2 - mean * d1)
    if first:
        tl.store(grad_gamma + c, dgamma)
        tl.store(grad_beta + c, d1)
    share = tl.where(size > 1, 1.0 / count.to(tl.float32), 0.0)
    b = -a * rstd * dgamma * share
    return a, b, -a * d1 * share - b * mean


@triton.jit(do_not_specialize=LOOSE)
def apply_bwd(
    d, sums, z, coef, grad_gamma, grad_beta, g, zs, coef_s, grad_gamma_s, grad_beta_s, gs, sizes,
    padded_batch, tiles, area,
    C: tl.constexpr, SHORT: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """g = gradient of z from d, that of bn(z), zero beyond the batch; with SHORT also gs, of the
    shortcut's zs."""
    wait()
    client, tile, size = client_of(sizes, tiles)
    if size == 0:
        return
    r = tile * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    off = (client * padded_batch * area + r)[:, None] * C + c[None, :]
    count = size * area
    valid = (r < count)[:, None]
    there = (r < padded_batch * area)[:, None]
    df = tl.load(d + off, mask=valid, other=0.0).to(tl.float32)
    zf = tl.load(z + off, mask=valid, other=0.0).to(tl.float32)
    if SHORT:
        zsf = tl.load(zs + off, mask=valid, other=0.0).to(tl.float32)
    sums += client * (3 if SHORT else 2) * C
    a, b, e = through(
        sums,
        1,
        coef + client * 4 * C,
        grad_gamma + client * C,
        grad_beta + client * C,
        c,
        C,
        size,
        count,
        tile == 0,
    )
    value = tl.where(valid, df * a[None, :] + zf * b[None, :] + e[None, :], 0.0)
    tl.store(g + off, value.to(g.dtype.element_ty), mask=there)
    if SHORT:
        a, b, e = through(
            sums,
            2,
            coef_s + client * 4 * C,
            grad_gamma_s + client * C,
            grad_beta_s + client * C,
            c,
            C,
            size,
            count,
            tile == 0,
        )
        value = tl.where(valid, df * a[None, :] + zsf * b[None, :] + e[None, :], 0.0)
        tl.store(gs + off, value.to(gs.dtype.element_ty), mask=there)
