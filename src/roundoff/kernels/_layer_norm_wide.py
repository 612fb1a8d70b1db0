"""The kernels for rows too wide for one program: several programs share a row.

J programs have K pieces of P columns each of the same rows. Every program holds the sums dweight
and dbias of its own columns in registers, as for narrow rows; what it lacks are the sums over whole
rows. So each publishes its share of a tile's sums, two numbers a row, as one word of 64 bits, asks
for the next tile, and reads the words of the others while that is on its way. A word that is not
there yet holds a bit pattern that no share has. Words are added in the order of the columns: the
bits of a result do not depend on who came first.

Reading waits for the others, so that all programs must be on the device at once: a cooperative
launch. The alternative is to launch the kernel twice, to publish and to finish from the words, and
so to read the rows twice. The interpreter does that, since it runs programs one after another.
"""

# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from ._layer_norm_kernels import added, inverse_root, normalised, quotient, same_bits
from ._runtime import kernel, sum_along


@kernel
def packed(a, b):
    """Two float32 as one integer of 64 bits, never -1 (two NaN with every bit set)."""
    low = a.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    word = (b.to(tl.int32, bitcast=True).to(tl.int64) << 32) | low
    return tl.where(word == -1, 0x7FC000007FC00000, word)


@kernel
def words_of(WORDS, rows, M, J: tl.constexpr, JP: tl.constexpr, WAIT: tl.constexpr):
    """The words (R, JP) of all shares of some rows; 0 beyond the last share and the last row."""
    share = tl.arange(0, JP)[None, :]
    # Beyond the last, the last one again: it is published, too.
    known = tl.minimum(rows, M - 1).to(tl.int64)[:, None]
    at = WORDS + known * J + tl.minimum(share, J - 1)
    if WAIT:
        # In assembly: a loop in Triton would keep the loop around it from being pipelined.
        words = tl.inline_asm_elementwise(
            """
            {
                .reg .pred missing;
            again:
                ld.relaxed.gpu.global.b64 $0, [$1];
                setp.eq.s64 missing, $0, -1;
                @missing bra again;
            }
            """,
            "=l,l", [at.to(tl.int64)], tl.int64, False, 1,
        )  # fmt: skip
    else:
        words = tl.load(at)
    return tl.where((rows < M)[:, None] & (share < J), words, 0)


@kernel
def low_of(words):
    return words.to(tl.int32).to(tl.float32, bitcast=True)


@kernel
def high_of(words):
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@kernel
def columns_at(W, k: tl.constexpr, P: tl.constexpr, cols, N):
    """Piece k of the columns of a program, any of which can end beyond the row."""
    return tl.load(W + cols + k * P, mask=cols + k * P < N, other=0.0)


@kernel
def publish_moments(
    X, RES, SUM, WORDS, x, rows, M, N, stride_x, cols, zero, share, J: tl.constexpr,
    P: tl.constexpr, K: tl.constexpr, EXACT: tl.constexpr, OPAQUE: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """A word a row: mean of this program's columns and squares about it; or the sum of squares."""
    count = tl.minimum(N - share * (K * P), K * P).to(tl.float32)
    squares = sum_along(x[0].to(tl.float32) * 0.0, 1)
    mean = squares
    if CENTRED:
        summed = tl.full(x[0].shape, 0.0, tl.float32)
        if EXACT:
            at = X + rows.to(tl.int64) * stride_x
            first = tl.load(at, mask=rows < M, other=0.0).to(tl.float32)
        for k in tl.static_range(K):
            if EXACT:
                summed += tl.where(cols + k * P < N, x[k].to(tl.float32) - first[:, None], 0.0)
            else:
                summed += x[k].to(tl.float32)
        mean = quotient(sum_along(summed, 1), count, tl.float32, EXACT)
        if EXACT:
            mean += first
    squared = tl.full(x[0].shape, 0.0, tl.float32)
    for k in tl.static_range(K):
        value = same_bits(x[k], zero, OPAQUE).to(tl.float32)
        if CENTRED:
            value = tl.where(cols + k * P < N, value - mean[:, None], 0.0)
        squared += value * value
    squares = sum_along(squared, 1)
    at = WORDS + rows.to(tl.int64) * J + share
    tl.atomic_xchg(at, packed(squares, mean), mask=rows < M, sem="relaxed", scope="gpu")


@kernel
def row_pieces(X, RES, SUM, tile, M, N, stride_x, cols, R: tl.constexpr, P: tl.constexpr,
               K: tl.constexpr, STORE: tl.constexpr):  # fmt: skip
    """The K pieces of a tile, with RES added; the sum stored once."""
    rows = tile * R + tl.arange(0, R)
    wide = rows.to(tl.int64)[:, None]
    x = ()
    for k in tl.static_range(K):
        mask = (rows < M)[:, None] & (cols + k * P < N)
        piece = tl.load(X + (wide * stride_x + cols) + k * P, mask=mask, other=0.0)
        if RES is not None:
            more = tl.load(RES + (wide * N + cols) + k * P, mask=mask, other=0.0)
            piece = added(piece, more, tl.float32)
            if STORE:
                tl.store(SUM + (wide * N + cols) + k * P, piece, mask=mask)
        x = x + (piece,)
    return x


@kernel
def forward_shared(
    X,  # (M, N), rows stride_x apart
    W,  # (N,)
    B,  # (N,)
    Y,  # (M, N), contiguous
    STATS,  # (2, M) or (1, M), float32
    WORDS,  # (M, J), int64, -1 everywhere at the start
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
    FINISH: tl.constexpr,
):
    """As ``forward``; moments of the shares are merged as Chan, Golub and LeVeque do."""
    share = tl.program_id(0) % J
    group = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    bias = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_at(W, k, P, cols, N),)
        if HAS_B and HOLD:
            bias = bias + (columns_at(B, k, P, cols, N),)
    counts = tl.minimum(tl.maximum(N - tl.arange(0, JP) * (K * P), 0), K * P).to(tl.float32)[
        None, :
    ]
    x = row_pieces(X, RES, SUM, group, M, N, stride_x, cols, R, P, K, PUBLISH)
    if PUBLISH:
        rows = group * R + tl.arange(0, R)
        publish_moments(X, RES, SUM, WORDS, x, rows, M, N, stride_x, cols, zero, share, J, P, K,
                        EXACT, OPAQUE, CENTRED)  # fmt: skip
    for tile in tl.range(group, tiles, groups, num_stages=STAGES):
        following = row_pieces(X, RES, SUM, tile + groups, M, N, stride_x, cols, R, P, K, PUBLISH)
        rows = tile * R + tl.arange(0, R)
        if FINISH:
            words = words_of(WORDS, rows, M, J, JP, PUBLISH)
            squares = low_of(words)
            size = tl.full((), N, tl.float32)
            if CENTRED:
                means = high_of(words)
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
        if PUBLISH:
            next_rows = rows + groups * R
            publish_moments(X, RES, SUM, WORDS, following, next_rows, M, N, stride_x, cols, zero,
                            share, J, P, K, EXACT, OPAQUE, CENTRED)  # fmt: skip
        x = following


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
    WORDS, x, dy, weight, W, mean, rstd, shift, rows, M, N, cols, share,
    J: tl.constexpr, P: tl.constexpr, K: tl.constexpr, HOLD: tl.constexpr, HAS_W: tl.constexpr,
    FUSED: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """A word a row: this program's share of the sums of xhat w g and of w g."""
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
    at = WORDS + rows.to(tl.int64) * J + share
    if CENTRED:
        a, b = tl.split(sum_along(tl.join(s1, s2), 1))
    else:
        a = sum_along(s1, 1)
        b = a
    tl.atomic_xchg(at, packed(a, b), mask=rows < M, sem="relaxed", scope="gpu")


@kernel
def backward_shared(
    X,  # (M, N), rows stride_x apart
    DY,  # (M, N), rows stride_dy apart
    W,  # (N,), or anything where not HAS_W
    STATS,  # (2, M): mean and rstd; (1, M): rstd where not CENTRED
    DX,  # (M, N), contiguous
    PART,  # (2, parts, N); (1, parts, N) where not CENTRED
    WORDS,  # (M, J), int64, -1 everywhere at the start
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
    FINISH: tl.constexpr,
):
    """As ``backward``, of K P columns; which rows a partial sum has depends on `parts` alone."""
    share = tl.program_id(0) % J
    group = tl.program_id(0) // J
    cols = share * (K * P) + tl.arange(0, P)[None, :]
    weight = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_at(W, k, P, cols, N),)
    for part in range(group, parts, groups):
        dw = ()
        db = ()
        for _ in tl.static_range(K):
            if PARTIALS:
                dw = dw + (tl.full((1 if SHARED else R, P), 0.0, tl.float32),)
                if CENTRED:
                    db = db + (tl.full((1 if SHARED else R, P), 0.0, tl.float32),)
        rows = part * R + tl.arange(0, R)
        x = row_pieces(X, None, None, part, M, N, stride_x, cols, R, P, K, False)
        dy = row_pieces(DY, None, None, part, M, N, stride_dy, cols, R, P, K, False)
        mean, rstd, shift = statistics(STATS, rows, M, CENTRED)
        if PUBLISH:
            publish_gradients(WORDS, x, dy, weight, W, mean, rstd, shift, rows, M, N, cols, share,
                              J, P, K, HOLD, HAS_W, FUSED, CENTRED)  # fmt: skip
        for tile in tl.range(part, tiles, parts, num_stages=STAGES):
            rows = tile * R + tl.arange(0, R)
            next_rows = rows + parts * R
            next_x = row_pieces(X, None, None, tile + parts, M, N, stride_x, cols, R, P, K, False)
            next_dy = row_pieces(
                DY, None, None, tile + parts, M, N, stride_dy, cols, R, P, K, False
            )
            next_mean, next_rstd, next_shift = statistics(STATS, next_rows, M, CENTRED)
            if FINISH:
                words = words_of(WORDS, rows, M, J, JP, PUBLISH)
                c1 = (sum_along(low_of(words), 1) / N)[:, None] * rstd
                if CENTRED:
                    c2 = (sum_along(high_of(words), 1) / N)[:, None] * rstd
                wide = rows.to(tl.int64)[:, None]
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
            if PUBLISH:
                publish_gradients(WORDS, next_x, next_dy, weight, W, next_mean, next_rstd,
                                  next_shift, next_rows, M, N, cols, share, J, P, K, HOLD, HAS_W,
                                  FUSED, CENTRED)  # fmt: skip
            x = next_x
            dy = next_dy
            mean = next_mean
            rstd = next_rstd
            shift = next_shift
        if PARTIALS and FINISH:
            flat = share * (K * P) + tl.arange(0, P)
            for k in tl.static_range(K):
                mask = flat + k * P < N
                at = PART + (tl.full((), 0, tl.int64) + part) * N + k * P + flat
                tl.store(at, sum_along(dw[k], 0), mask=mask)
                if CENTRED:
                    tl.store(at + parts.to(tl.int64) * N, sum_along(db[k], 0), mask=mask)
