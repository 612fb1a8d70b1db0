"""The backward of rows too wide for one program: several programs share a row, in one launch.

J programs have K pieces of P columns each of the same rows, and hold the sums dweight and dbias of
their own columns in registers, as for narrow rows. What each lacks are two sums over whole rows: it
writes its share of them to memory and reads the others'. That takes longer than a row does, so a
program takes its share of one or two rows ahead of the row that it finishes, and keeps them in
registers: rows are read once, and shares have nearly always come when they are needed.

A program that waits must not keep the one it waits for from running: the launch is cooperative.
Triton's interpreter runs a program to its end; there a first launch writes all shares.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from ._layer_norm_kernels import normalised, same_bits, statistics_of
from ._runtime import kernel, sum_along


@kernel
def columns_at(W, k: tl.constexpr, P: tl.constexpr, cols, N):
    """Piece k of the columns of a program, any of which can end beyond the row."""
    return tl.load(W + cols + k * P, mask=cols + k * P < N, other=0.0)


@kernel
def fetch(at):
    """Have the L2 cache fetch the lines at some addresses, which are soon to be read."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1
    )


@kernel
def row_of(T, row, stride, cols, M, N, P: tl.constexpr, K: tl.constexpr):
    """The K pieces of a row of a tensor; 0 beyond its end, and of a row that there is not."""
    at = T + (tl.full((), 0, tl.int64) + row) * stride + cols
    pieces = ()
    for k in tl.static_range(K):
        mask = (row < M) & (cols + k * P < N)
        pieces = pieces + (tl.load(at + k * P, mask=mask, other=0.0),)
    return pieces


@kernel
def put_share(
    x,
    dy,
    mean,
    rstd,
    row,
    weight,
    SHARES,
    W,
    M,
    N,
    cols,
    share,
    J: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    HOLD: tl.constexpr,
    HAS_W: tl.constexpr,
    FUSED: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """This program's share of the sums of xhat w g and of w g, as the halves of one integer."""
    shift = -mean * rstd
    s1 = tl.full(x[0].shape, 0.0, tl.float32)
    s2 = tl.full(x[0].shape, 0.0, tl.float32)
    for k in tl.static_range(K):
        xhat = normalised(x[k], mean, rstd, shift, FUSED, CENTRED)
        wg = dy[k].to(tl.float32)
        if HAS_W:
            w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
            wg = wg * w.to(tl.float32)
        s1 += xhat * wg  # beyond the row dy is 0
        s2 += wg
    if CENTRED:
        a, b = tl.split(sum_along(tl.join(s1, s2), 1))
        high = sum_along(b, 0).to(tl.int32, bitcast=True).to(tl.int64) << 32
    else:
        a = sum_along(s1, 1)
        high = tl.full((), 0, tl.int64)
    low = sum_along(a, 0).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    tl.store(SHARES + (tl.full((), 0, tl.int64) + row) * J + share, high | low, mask=row < M)


@kernel
def shares_at(SHARES, row, J: tl.constexpr):
    """The shares of a row, as far as they are there: all are asked for before one is needed."""
    at = SHARES + (tl.full((), 0, tl.int64) + row) * J
    bits = ()
    for j in tl.static_range(J):
        bits = bits + (tl.load(at + j, volatile=True),)
    return bits


@kernel
def sums_of(SHARES, bits, row, J: tl.constexpr, WAIT: tl.constexpr):
    """The sums of a row: its shares in the order of the columns, each awaited.

    Both halves of -1 are a NaN that no addition gives: -1 is no share.
    """
    at = SHARES + (tl.full((), 0, tl.int64) + row) * J
    a = 0.0
    b = 0.0
    for j in tl.static_range(J):
        one = bits[j]
        if WAIT:
            while one == -1:
                one = tl.load(at + j, volatile=True)
        a += (one & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
        b += (one >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, b


@kernel
def backward_shared(
    X,  # (M, N), rows stride_x apart
    DY,  # (M, N), rows stride_dy apart
    W,  # (N,), or anything where not HAS_W
    STATS,  # (2, M): mean and rstd; (1, M): rstd where not CENTRED
    DX,  # (M, N), contiguous
    PART,  # (2, parts, N); (1, parts, N) where not CENTRED
    SHARES,  # (M, J), int64: -1, or what this kernel wrote before
    M,
    N,
    stride_x,
    stride_dy,
    groups,  # of J programs, all of which run at the same time
    parts,  # partial sums; a group may have several, one after another
    zero,  # 0
    P: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    LINES: tl.constexpr,  # of 128 bytes that a program has of a row; 0: none is fetched ahead
    DEPTH: tl.constexpr,  # 1 or 2: rows between a share and its use
    HOLD: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_W: tl.constexpr,
    PARTIALS: tl.constexpr,
    OPAQUE: tl.constexpr,
    CENTRED: tl.constexpr,
    WAIT: tl.constexpr,  # for shares that another program of this launch writes
    FINISH: tl.constexpr,  # else shares alone are written
):
    """As ``backward``, of K P columns; which rows a partial sum has depends on `parts` alone."""
    share = tl.program_id(0) % J
    group = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_at(W, k, P, cols, N),)
    there = SHARES, W, M, N, cols, share
    for part in range(group, parts, groups):
        dw = ()
        db = ()
        for _ in tl.static_range(K):
            if PARTIALS:
                dw = dw + (tl.full((1, P), 0.0, tl.float32),)
                if CENTRED:
                    db = db + (tl.full((1, P), 0.0, tl.float32),)
        x = row_of(X, part, stride_x, cols, M, N, P, K)
        dy = row_of(DY, part, stride_dy, cols, M, N, P, K)
        mean, rstd = statistics_of(STATS, part, M, CENTRED)
        put_share(x, dy, mean, rstd, part, weight, *there, J, P, K, HOLD, HAS_W, FUSED, CENTRED)
        if DEPTH == 2:
            x_2 = row_of(X, part + parts, stride_x, cols, M, N, P, K)
            dy_2 = row_of(DY, part + parts, stride_dy, cols, M, N, P, K)
            mean_2, rstd_2 = statistics_of(STATS, part + parts, M, CENTRED)
            put_share(
                x_2,
                dy_2,
                mean_2,
                rstd_2,
                part + parts,
                weight,
                *there,
                J,
                P,
                K,
                HOLD,
                HAS_W,
                FUSED,
                CENTRED,
            )
        for row in tl.range(part, M, parts):
            ahead = row + DEPTH * parts
            wide = tl.full((), 0, tl.int64) + row
            if LINES:
                later = tl.minimum(wide + (DEPTH + 1) * parts, M - 1)
                size: tl.constexpr = X.dtype.element_ty.primitive_bitwidth // 8
                line = tl.minimum(share * (K * P) + tl.arange(0, LINES) * (128 // size), N - 1)
                fetch(X + later * stride_x + line)
                fetch(DY + later * stride_dy + line)
            if FINISH:
                bits = shares_at(SHARES, row, J)
            x_n = row_of(X, ahead, stride_x, cols, M, N, P, K)
            dy_n = row_of(DY, ahead, stride_dy, cols, M, N, P, K)
            mean_n, rstd_n = statistics_of(STATS, ahead, M, CENTRED)
            if FINISH:
                a, b = sums_of(SHARES, bits, row, J, WAIT)
                c1 = a / N * rstd
                c2 = b / N * rstd
                shift = -mean * rstd
            if FINISH and row < M:  # always, as in ``backward``
                next_dw = ()
                next_db = ()
                for k in tl.static_range(K):
                    again = same_bits(x[k], zero, OPAQUE)
                    xhat = normalised(again, mean, rstd, shift, FUSED, CENTRED)
                    g = same_bits(dy[k], zero, OPAQUE).to(tl.float32)
                    wg = g
                    if HAS_W:
                        w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
                        wg = g * same_bits(w, zero, OPAQUE and HOLD).to(tl.float32)
                    if PARTIALS:
                        next_dw = next_dw + (dw[k] + g * xhat,)
                        if CENTRED:
                            next_db = next_db + (db[k] + g,)
                    dx = ((wg * rstd - c2) if CENTRED else wg * rstd) - xhat * c1
                    dx_at = DX + (wide * N + cols) + k * P
                    tl.store(dx_at, dx.to(DX.dtype.element_ty), mask=cols + k * P < N)
                dw = next_dw
                db = next_db
            if ahead < M:
                put_share(
                    x_n,
                    dy_n,
                    mean_n,
                    rstd_n,
                    ahead,
                    weight,
                    *there,
                    J,
                    P,
                    K,
                    HOLD,
                    HAS_W,
                    FUSED,
                    CENTRED,
                )
            if DEPTH == 2:
                x = x_2
                dy = dy_2
                mean = mean_2
                rstd = rstd_2
                x_2 = x_n
                dy_2 = dy_n
                mean_2 = mean_n
                rstd_2 = rstd_n
            else:
                x = x_n
                dy = dy_n
                mean = mean_n
                rstd = rstd_n
        if PARTIALS and FINISH:
            flat = share * (K * P) + tl.arange(0, P)
            for k in tl.static_range(K):
                mask = flat + k * P < N
                at = PART + (tl.full((), 0, tl.int64) + part) * N + k * P + flat
                tl.store(at, sum_along(dw[k], 0), mask=mask)
                if CENTRED:
                    tl.store(at + parts.to(tl.int64) * N, sum_along(db[k], 0), mask=mask)
