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
from ._runtime import COMPILED, kernel, sum_along


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
def taken(
    X,
    DY,
    STATS,
    row,
    stride_x,
    stride_dy,
    cols,
    M,
    N,
    P: tl.constexpr,
    K: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """The K pieces of a row of x and of dy, and its statistics; 0 beyond an end."""
    wide = tl.full((), 0, tl.int64) + row
    x = ()
    dy = ()
    for k in tl.static_range(K):
        mask = (row < M) & (cols + k * P < N)
        x = x + (tl.load(X + wide * stride_x + cols + k * P, mask=mask, other=0.0),)
    for k in tl.static_range(K):
        mask = (row < M) & (cols + k * P < N)
        dy = dy + (tl.load(DY + wide * stride_dy + cols + k * P, mask=mask, other=0.0),)
    mean, rstd = statistics_of(STATS, row, M, CENTRED)
    return x, dy, mean, rstd


@kernel
def put_share(
    values,
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
    x, dy, mean, rstd = values
    s1 = tl.full(x[0].shape, 0.0, tl.float32)
    s2 = tl.full(x[0].shape, 0.0, tl.float32)
    for k in tl.static_range(K):
        xhat = normalised(x[k], mean, rstd, FUSED, CENTRED)
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
    parts,  # partial sums: groups of J programs, all of which run at the same time
    zero,  # 0
    P: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    LINES: tl.constexpr,  # of 128 bytes that a program has of a row
    DEPTH: tl.constexpr,  # 1 or 2: rows between a share and its use
    HOLD: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
    FINISH: tl.constexpr,  # else shares alone are written
):
    """As ``backward``, of K P columns; which rows a partial sum has depends on `parts` alone."""
    FUSED: tl.constexpr = X.dtype.element_ty != tl.float32
    OPAQUE: tl.constexpr = COMPILED and FUSED
    share = tl.program_id(0) % J
    first = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_at(W, k, P, cols, N),)
    there = SHARES, W, M, N, cols, share
    # A loop of one turn: without it 24 bytes of a thread are spilled, with it 8 (131,072 columns).
    for part in range(first, parts, parts):
        layout = stride_x, stride_dy, cols, M, N
        dw = ()
        db = ()
        for _ in tl.static_range(K):
            dw = dw + (tl.full((1, P), 0.0, tl.float32),)
            if CENTRED:
                db = db + (tl.full((1, P), 0.0, tl.float32),)
        # Rows whose shares are there, and which wait for those of others.
        held = ()
        for i in tl.static_range(DEPTH):
            early = part + i * parts
            held = held + (taken(X, DY, STATS, early, *layout, P, K, CENTRED),)
            put_share(held[i], early, weight, *there, J, P, K, HOLD, HAS_W, FUSED, CENTRED)
        for row in tl.range(part, M, parts):
            ahead = row + DEPTH * parts
            wide = tl.full((), 0, tl.int64) + row
            if COMPILED:
                later = tl.minimum(wide + (DEPTH + 1) * parts, M - 1)
                size: tl.constexpr = X.dtype.element_ty.primitive_bitwidth // 8
                line = tl.minimum(share * (K * P) + tl.arange(0, LINES) * (128 // size), N - 1)
                fetch(X + later * stride_x + line)
                fetch(DY + later * stride_dy + line)
            if FINISH:
                shares_at, bits = SHARES + wide * J, ()
                for j in tl.static_range(J):  # all are asked for before one is needed
                    bits = bits + (tl.load(shares_at + j, volatile=True),)
            x, dy, mean, rstd = held[0]
            held = held + (taken(X, DY, STATS, ahead, *layout, P, K, CENTRED),)
            if FINISH:
                # The sums of the row: its shares in the order of the columns, each awaited. Both
                # halves of -1 are a NaN that no addition gives: -1 is no share.
                a = 0.0
                b = 0.0
                for j in tl.static_range(J):
                    one = bits[j]
                    if COMPILED:
                        while one == -1:
                            one = tl.load(shares_at + j, volatile=True)
                    a += (one & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
                    b += (one >> 32).to(tl.int32).to(tl.float32, bitcast=True)
                c1 = a / N * rstd
                c2 = b / N * rstd
            if FINISH and row < M:  # always, as in ``backward``
                next_dw = ()
                next_db = ()
                for k in tl.static_range(K):
                    again = same_bits(x[k], zero, OPAQUE)
                    xhat = normalised(again, mean, rstd, FUSED, CENTRED)
                    g = same_bits(dy[k], zero, OPAQUE).to(tl.float32)
                    wg = g
                    if HAS_W:
                        w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
                        wg = g * same_bits(w, zero, OPAQUE and HOLD).to(tl.float32)
                    next_dw = next_dw + (dw[k] + g * xhat,)
                    if CENTRED:
                        next_db = next_db + (db[k] + g,)
                    dx = ((wg * rstd - c2) if CENTRED else wg * rstd) - xhat * c1
                    dx_at = DX + (wide * N + cols) + k * P
                    tl.store(dx_at, dx.to(DX.dtype.element_ty), mask=cols + k * P < N)
                dw = next_dw
                db = next_db
            if ahead < M:
                put_share(held[DEPTH], ahead, weight, *there, J, P, K, HOLD, HAS_W, FUSED, CENTRED)
            held = held[1:]
        if FINISH:
            flat = share * (K * P) + tl.arange(0, P)
            for k in tl.static_range(K):
                mask = flat + k * P < N
                at = PART + (tl.full((), 0, tl.int64) + part) * N + k * P + flat
                tl.store(at, sum_along(dw[k], 0), mask=mask)
                if CENTRED:
                    tl.store(at + parts.to(tl.int64) * N, sum_along(db[k], 0), mask=mask)
