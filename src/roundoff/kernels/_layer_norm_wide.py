"""The kernels for rows too wide for one program: several programs share a row.

J programs have K pieces of P columns each of the same rows. Every program holds the sums dweight
and dbias of its own columns in registers, as for narrow rows; what it lacks are the sums over whole
rows. So each kernel is launched twice: first (PUBLISH) each program writes its share of the sums of
a row, one or two numbers; then it adds the shares of all, in the order of the columns, and
finishes. Rows are read twice. The first launch takes the last rows first, so that the second begins
with rows that are still in the cache.

One cooperative launch, whose programs wait for each other's shares, reads them once. On an H200 it
took twice the time: 1249 instead of 2400 GB/s at 32,768 columns, backward, float16.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from ._layer_norm_kernels import added, inverse_root, normalised, quotient, same_bits
from ._runtime import kernel, sum_along


@kernel
def shares_of(SHARES, rows, M, J: tl.constexpr, JP: tl.constexpr):
    """The shares (R, JP) of some rows; 0 beyond the last share and the last row."""
    share = tl.arange(0, JP)[None, :]
    mask = (rows < M)[:, None] & (share < J)
    return tl.load(SHARES + rows.to(tl.int64)[:, None] * J + share, mask=mask, other=0.0)


@kernel
def columns_at(W, k: tl.constexpr, P: tl.constexpr, cols, N):
    """Piece k of the columns of a program, any of which can end beyond the row."""
    return tl.load(W + cols + k * P, mask=cols + k * P < N, other=0.0)


@kernel
def publish_moments(
    X, SHARES, x, rows, M, N, stride_x, cols, zero, share, J: tl.constexpr, P: tl.constexpr,
    K: tl.constexpr, EXACT: tl.constexpr, OPAQUE: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Of each row, squares about the mean of this program's columns, and that mean."""
    at = SHARES + rows.to(tl.int64) * J + share
    count = tl.minimum(N - share * (K * P), K * P).to(tl.float32)
    if CENTRED:
        summed = tl.full(x[0].shape, 0.0, tl.float32)
        if EXACT:
            first_at = X + rows.to(tl.int64) * stride_x
            first = tl.load(first_at, mask=rows < M, other=0.0).to(tl.float32)
        for k in tl.static_range(K):
            if EXACT:
                summed += tl.where(cols + k * P < N, x[k].to(tl.float32) - first[:, None], 0.0)
            else:
                summed += x[k].to(tl.float32)
        mean = quotient(sum_along(summed, 1), count, tl.float32, EXACT)
        if EXACT:
            mean += first
        tl.store(at + M.to(tl.int64) * J, mean, mask=rows < M)
    squared = tl.full(x[0].shape, 0.0, tl.float32)
    for k in tl.static_range(K):
        value = same_bits(x[k], zero, OPAQUE).to(tl.float32)
        if CENTRED:
            value = tl.where(cols + k * P < N, value - mean[:, None], 0.0)
        squared += value * value
    tl.store(at, sum_along(squared, 1), mask=rows < M)


@kernel
def row_pieces(X, rows, M, N, stride_x, cols, P: tl.constexpr, K: tl.constexpr):
    """The K pieces of some rows."""
    wide = rows.to(tl.int64)[:, None]
    x = ()
    for k in tl.static_range(K):
        mask = (rows < M)[:, None] & (cols + k * P < N)
        x = x + (tl.load(X + (wide * stride_x + cols) + k * P, mask=mask, other=0.0),)
    return x


@kernel
def with_residual(x, RES, SUM, rows, M, N, cols, P: tl.constexpr, K: tl.constexpr):
    """x + RES, which is stored, too."""
    wide = rows.to(tl.int64)[:, None]
    summed = ()
    for k in tl.static_range(K):
        mask = (rows < M)[:, None] & (cols + k * P < N)
        more = tl.load(RES + (wide * N + cols) + k * P, mask=mask, other=0.0)
        piece = added(x[k], more, tl.float32)
        tl.store(SUM + (wide * N + cols) + k * P, piece, mask=mask)
        summed = summed + (piece,)
    return summed


@kernel
def forward_shared(
    X,  # (M, N), rows stride_x apart
    W,  # (N,)
    B,  # (N,)
    Y,  # (M, N), contiguous
    STATS,  # (2, M) or (1, M), float32
    SHARES,  # (2, M, J) or (1, M, J), float32
    RES,
    SUM,
    M,
    N,
    stride_x,
    tiles,  # ceil(M / R)
    groups,  # of J programs: the programs of a group share rows
    zero,
    EPS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    JP: tl.constexpr,  # a power of two, not below J
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    KEEP: tl.constexpr,
    EXACT: tl.constexpr,
    OPAQUE: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    """As ``forward``; moments of the shares are merged as Chan, Golub and LeVeque do."""
    share = tl.program_id(0) % J
    group = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    bias = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD and not PUBLISH:
            weight = weight + (columns_at(W, k, P, cols, N),)
        if HAS_B and HOLD and not PUBLISH:
            bias = bias + (columns_at(B, k, P, cols, N),)
    counts = tl.minimum(tl.maximum(N - tl.arange(0, JP) * (K * P), 0), K * P).to(tl.float32)[
        None, :
    ]
    for turn in tl.range(group, tiles, groups, num_stages=STAGES):
        if PUBLISH:
            rows = (tiles - 1 - turn) * R + tl.arange(0, R)
            x = row_pieces(X, rows, M, N, stride_x, cols, P, K)
            if RES is not None:
                x = with_residual(x, RES, SUM, rows, M, N, cols, P, K)
            publish_moments(X, SHARES, x, rows, M, N, stride_x, cols, zero, share, J, P, K, EXACT,
                            OPAQUE, CENTRED)  # fmt: skip
        else:
            rows = turn * R + tl.arange(0, R)
            if RES is not None:  # the other launch stored the sum
                x = row_pieces(SUM, rows, M, N, N, cols, P, K)
            else:
                x = row_pieces(X, rows, M, N, stride_x, cols, P, K)
            squares = shares_of(SHARES, rows, M, J, JP)
            size = tl.full((), N, tl.float32)
            if CENTRED:
                means = shares_of(SHARES + M.to(tl.int64) * J, rows, M, J, JP)
                if EXACT:  # about the first share's mean, for the same reason as in a row
                    base = sum_along(tl.where(tl.arange(0, JP)[None, :] == 0, means, 0.0), 1)
                    means = tl.where(counts > 0, means - base[:, None], 0.0)
                mean = quotient(sum_along(means * counts, 1), size, tl.float32, EXACT)
                apart = means - mean[:, None]
                squares += apart * apart * counts
                if EXACT:
                    mean += base
            variance = quotient(sum_along(squares, 1), size, tl.float32, EXACT) + EPS
            rstd = inverse_root(tl.where(rows < M, variance, 1.0), tl.float32, EXACT)
            if KEEP:
                once = (rows < M) & (share == 0)
                if CENTRED:
                    tl.store(STATS + rows, mean, mask=once)
                    tl.store(STATS + M + rows, rstd, mask=once)
                else:
                    tl.store(STATS + rows, rstd, mask=once)
            wide = rows.to(tl.int64)[:, None]
            for k in tl.static_range(K):
                y = same_bits(x[k], zero, OPAQUE).to(tl.float32)
                y = (y - mean[:, None]) * rstd[:, None] if CENTRED else y * rstd[:, None]
                if ROUND:
                    y = y.to(Y.dtype.element_ty).to(tl.float32)
                if HAS_W:
                    w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
                    y = y * w.to(tl.float32)
                if HAS_B:
                    b = bias[k] if HOLD else columns_at(B, k, P, cols, N)
                    y = y + b.to(tl.float32)
                mask = (rows < M)[:, None] & (cols + k * P < N)
                tl.store(Y + (wide * N + cols) + k * P, y.to(Y.dtype.element_ty), mask=mask)


@kernel
def statistics(STATS, rows, M, CENTRED: tl.constexpr):
    """mean, rstd and -mean rstd of some rows, as columns."""
    if CENTRED:
        mean = tl.load(STATS + rows, mask=rows < M, other=0.0)[:, None]
        rstd = tl.load(STATS + M + rows, mask=rows < M, other=0.0)[:, None]
        return mean, rstd, -mean * rstd
    else:
        rstd = tl.load(STATS + rows, mask=rows < M, other=0.0)[:, None]
        return rstd * 0.0, rstd, rstd * 0.0


@kernel
def publish_gradients(
    SHARES, x, dy, W, mean, rstd, shift, rows, M, N, cols, share, weight,
    J: tl.constexpr, P: tl.constexpr, K: tl.constexpr, HOLD: tl.constexpr, HAS_W: tl.constexpr,
    FUSED: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Of each row, this program's share of the sums of xhat w g and of w g."""
    s1 = tl.full(x[0].shape, 0.0, tl.float32)
    s2 = tl.full(x[0].shape, 0.0, tl.float32)
    for k in tl.static_range(K):
        xhat = normalised(x[k], mean, rstd, shift, tl.float32, FUSED, CENTRED)
        wg = dy[k].to(tl.float32)
        if HAS_W:
            w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
            wg = wg * w.to(tl.float32)
        s1 += xhat * wg  # beyond the row dy is 0
        s2 += wg
    at = SHARES + rows.to(tl.int64) * J + share
    if CENTRED:
        a, b = tl.split(sum_along(tl.join(s1, s2), 1))
        tl.store(at + M.to(tl.int64) * J, b, mask=rows < M)
    else:
        a = sum_along(s1, 1)
    tl.store(at, a, mask=rows < M)


@kernel
def backward_shared(
    X,  # (M, N), rows stride_x apart
    DY,  # (M, N), rows stride_dy apart
    W,  # (N,), or anything where not HAS_W
    STATS,  # (2, M): mean and rstd; (1, M): rstd where not CENTRED
    DX,  # (M, N), contiguous
    PART,  # (2, parts, N); (1, parts, N) where not CENTRED
    SHARES,  # (2, M, J) or (1, M, J), float32
    DH,  # (M, N), contiguous: added to dx; or None
    M,
    N,
    stride_x,
    stride_dy,
    tiles,  # ceil(M / R)
    groups,  # of J programs
    parts,  # partial sums; a group may have several, one after another
    zero,  # 0
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    J: tl.constexpr,
    JP: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,
    SHARED: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_W: tl.constexpr,
    PARTIALS: tl.constexpr,
    OPAQUE: tl.constexpr,
    CENTRED: tl.constexpr,
    ROUND: tl.constexpr,
    PUBLISH: tl.constexpr,
):
    """As ``backward``, of K P columns; which rows a partial sum has depends on `parts` alone."""
    share = tl.program_id(0) % J
    group = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_at(W, k, P, cols, N),)
    if PUBLISH:
        for turn in tl.range(group, tiles, groups, num_stages=STAGES):
            rows = (tiles - 1 - turn) * R + tl.arange(0, R)
            x = row_pieces(X, rows, M, N, stride_x, cols, P, K)
            dy = row_pieces(DY, rows, M, N, stride_dy, cols, P, K)
            mean, rstd, shift = statistics(STATS, rows, M, CENTRED)
            publish_gradients(SHARES, x, dy, W, mean, rstd, shift, rows, M, N, cols, share, weight,
                              J, P, K, HOLD, HAS_W, FUSED, CENTRED)  # fmt: skip
        return
    for part in range(group, parts, groups):
        dw = ()
        db = ()
        for _ in tl.static_range(K):
            if PARTIALS:
                dw = dw + (tl.full((1 if SHARED else R, P), 0.0, tl.float32),)
                if CENTRED:
                    db = db + (tl.full((1 if SHARED else R, P), 0.0, tl.float32),)
        for tile in tl.range(part, tiles, parts, num_stages=STAGES):
            rows = tile * R + tl.arange(0, R)
            x = row_pieces(X, rows, M, N, stride_x, cols, P, K)
            dy = row_pieces(DY, rows, M, N, stride_dy, cols, P, K)
            mean, rstd, shift = statistics(STATS, rows, M, CENTRED)
            c1 = (sum_along(shares_of(SHARES, rows, M, J, JP), 1) / N)[:, None] * rstd
            if CENTRED:
                others = shares_of(SHARES + M.to(tl.int64) * J, rows, M, J, JP)
                c2 = (sum_along(others, 1) / N)[:, None] * rstd
            wide = rows.to(tl.int64)[:, None]
            if tile < tiles:  # always, as in ``backward``
                next_dw = ()
                next_db = ()
                for k in tl.static_range(K):
                    again = same_bits(x[k], zero, OPAQUE)
                    xhat = normalised(again, mean, rstd, shift, tl.float32, FUSED, CENTRED)
                    g = same_bits(dy[k], zero, OPAQUE).to(tl.float32)
                    wg = g
                    if HAS_W:
                        w = weight[k] if HOLD else columns_at(W, k, P, cols, N)
                        wg = g * w.to(tl.float32)
                    if PARTIALS:
                        factor = xhat.to(DX.dtype.element_ty).to(tl.float32) if ROUND else xhat
                        if SHARED:
                            next_dw = next_dw + (dw[k] + sum_along(g * factor, 0)[None, :],)
                            if CENTRED:
                                next_db = next_db + (db[k] + sum_along(g, 0)[None, :],)
                        else:
                            next_dw = next_dw + (dw[k] + g * factor,)
                            if CENTRED:
                                next_db = next_db + (db[k] + g,)
                    dx = ((wg * rstd - c2) if CENTRED else wg * rstd) - xhat * c1
                    mask = (rows < M)[:, None] & (cols + k * P < N)
                    if DH is not None:
                        dh_at = DH + (wide * N + cols) + k * P
                        dx += tl.load(dh_at, mask=mask, other=0.0).to(tl.float32)
                    tl.store(DX + (wide * N + cols) + k * P, dx.to(DX.dtype.element_ty), mask=mask)
                dw = next_dw
                db = next_db
        if PARTIALS:
            flat = share * (K * P) + tl.arange(0, P)
            for k in tl.static_range(K):
                mask = flat + k * P < N
                at = PART + (tl.full((), 0, tl.int64) + part) * N + k * P + flat
                tl.store(at, sum_along(dw[k], 0), mask=mask)
                if CENTRED:
                    tl.store(at + parts.to(tl.int64) * N, sum_along(db[k], 0), mask=mask)
