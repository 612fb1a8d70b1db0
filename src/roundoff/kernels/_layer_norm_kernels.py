"""The Triton kernels of :func:`roundoff.kernels.layer_norm` and :func:`roundoff.kernels.rms_norm`.

A row of N columns is cut into K pieces of P columns, P a power of two. Only the last piece needs a
mask, and a width just above a power of two costs one more piece, not a block of twice the size. R
rows form a tile. Sums and products are float32, whatever the rows' type.

CENTRED is layer normalisation; without it, RMSNorm, no mean is taken and there is no bias. An
argument of None is no argument of the compiled kernel.
"""

# A language of its own: without starred tuples, and typed by Triton.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl
import triton.language.extra.cuda as tlc

from ._runtime import COMPILED, kernel, sum_along

#: The type of sums and products.
ACC = tl.constexpr(tl.float32)


@kernel
def same_bits(x, zero, OPAQUE: tl.constexpr):
    """x, by an operation that the compiler cannot remove (`zero` is 0, which it does not know).

    A row is needed twice, before and after its sums are known. Without this the compiler converts
    it to float32 once and keeps that: twice the registers. With it the row stays packed.
    """
    if OPAQUE:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, zero.to(tl.int16)], x.dtype, True, 2
        )
    return x


@kernel
def quotient(x, y, EXACT: tl.constexpr):
    """x / y; Triton's is off by up to two units, unless correctly rounded at a cost."""
    if EXACT:
        return tl.div_rn(x, y)
    else:
        return x / y


@kernel
def inverse_root(x, EXACT: tl.constexpr):
    """1 / sqrt(x), with the same choice."""
    if EXACT:
        return tl.div_rn(1.0, tl.sqrt_rn(x))
    else:
        return 1.0 / tl.sqrt(x)


@kernel
def columns_of(W, k: tl.constexpr, K: tl.constexpr, P: tl.constexpr, cols, last):
    """Piece k of a vector; only the last of K pieces can end beyond it."""
    if k == K - 1:
        return tl.load(W + cols + k * P, mask=last, other=0.0)
    else:
        return tl.load(W + cols + k * P)


@kernel
def normalised(x, mean, rstd, FUSED: tl.constexpr, CENTRED: tl.constexpr):
    """(x - mean) rstd; for two-byte types, whose spacing is far wider, as x rstd - mean rstd."""
    if not CENTRED:
        return x.to(ACC) * rstd
    elif FUSED:
        return x.to(ACC) * rstd + -mean * rstd
    else:
        return (x.to(ACC) - mean) * rstd


@kernel
def statistics_of(STATS, row, M, CENTRED: tl.constexpr):
    """mean and rstd of a row, or of several, 0 of one that there is not."""
    if CENTRED:
        mean = tl.load(STATS + row, mask=row < M, other=0.0)
        return mean, tl.load(STATS + M + row, mask=row < M, other=0.0)
    else:
        return 0.0, tl.load(STATS + row, mask=row < M, other=0.0)


@kernel
def forward(
    X,  # (M, N), rows stride_x apart
    W,  # (N,) or anything where not HAS_W
    B,  # (N,) or anything where not HAS_B
    Y,  # (M, N), contiguous
    STATS,  # (2, M) float32: mean and rstd, (1, M): rstd; anything where not KEEP
    M,
    N,
    stride_x,
    tiles,  # ceil(M / R)
    zero,  # 0
    EPS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
    HOLD: tl.constexpr,  # weight and bias stay in registers; else they come from the cache
    AGAIN: tl.constexpr,  # convert once more for the result, too
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    KEEP: tl.constexpr,  # mean and rstd, for a backward
):
    """Tiles of R whole rows: mean, then variance about it, then the result."""
    # Of a type as wide as the sums: a rounding of those would be seen.
    EXACT: tl.constexpr = X.dtype.element_ty == tl.float32
    OPAQUE: tl.constexpr = COMPILED and not EXACT
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, P)[None, :]
    last = (K - 1) * P + cols < N
    weight = ()
    bias = ()
    for k in tl.static_range(K):
        if HAS_W and HOLD:
            weight = weight + (columns_of(W, k, K, P, cols, last),)
        if HAS_B and HOLD:
            bias = bias + (columns_of(B, k, K, P, cols, last),)
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = tile * R + tl.arange(0, R)
        here = (rows < M)[:, None]
        x_at = X + (rows.to(tl.int64)[:, None] * stride_x + cols)
        y_at = Y + (rows.to(tl.int64)[:, None] * N + cols)
        x = ()
        summed = tl.full((R, P), 0.0, ACC)
        if EXACT and CENTRED:
            # Numbers about the first of their row: their sum is small, and so is its rounding.
            first = tl.load(X + rows.to(tl.int64) * stride_x, mask=rows < M, other=0.0).to(ACC)
        for k in tl.static_range(K):
            mask = here & last if k == K - 1 else here
            piece = tl.load(x_at + k * P, mask=mask, other=0.0)
            x = x + (piece,)
            if CENTRED:
                if EXACT:
                    from_first = piece.to(ACC) - first[:, None]
                    summed += tl.where(last, from_first, 0.0) if k == K - 1 else from_first
                else:
                    summed += piece.to(ACC)
            else:
                summed += piece.to(ACC) * piece.to(ACC)
        if CENTRED:
            mean = quotient(sum_along(summed, 1), tl.full((), N, ACC), EXACT)
            if EXACT:
                mean += first
            squared = tl.full((R, P), 0.0, ACC)
            for k in tl.static_range(K):
                centred = same_bits(x[k], zero, OPAQUE).to(ACC) - mean[:, None]
                if k == K - 1:
                    centred = tl.where(last, centred, 0.0)
                squared += centred * centred
        else:
            squared = summed
        variance = quotient(sum_along(squared, 1), tl.full((), N, ACC), EXACT) + EPS
        rstd = inverse_root(tl.where(rows < M, variance, 1.0), EXACT)
        if KEEP:
            if CENTRED:
                tl.store(STATS + rows, mean, mask=rows < M)
                tl.store(STATS + M + rows, rstd, mask=rows < M)
            else:
                tl.store(STATS + rows, rstd, mask=rows < M)
        # Always true. What is read in a block of its own is not loaded ahead: only x is to be.
        later = tile < tiles if STAGES > 1 and not HOLD else True
        # Another number that is 0: with the same one the compiler would take what it converted for
        # the variance, and keep float32 from there to here.
        other = zero + zero if AGAIN else zero
        if later:
            for k in tl.static_range(K):
                if CENTRED:
                    y = (same_bits(x[k], other, OPAQUE).to(ACC) - mean[:, None]) * rstd[:, None]
                else:
                    y = same_bits(x[k], other, OPAQUE).to(ACC) * rstd[:, None]
                if HAS_W:
                    w = weight[k] if HOLD else columns_of(W, k, K, P, cols, last)
                    y = y * w.to(ACC)
                if HAS_B:
                    b = bias[k] if HOLD else columns_of(B, k, K, P, cols, last)
                    y = y + b.to(ACC)
                mask = here & last if k == K - 1 else here
                tl.store(y_at + k * P, y.to(Y.dtype.element_ty), mask=mask)


@kernel
def forward_wide(
    X,
    W,
    B,
    Y,
    STATS,
    M,
    N,
    stride_x,
    EPS: tl.constexpr,
    P: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
    HAS_B: tl.constexpr,
    KEEP: tl.constexpr,
):
    """For rows too wide for the registers: mean and squares of each chunk are merged."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, P)
    mean = tl.full((), 0.0, ACC)
    squares = tl.full((), 0.0, ACC)
    SHIFTED: tl.constexpr = CENTRED and X.dtype.element_ty == tl.float32
    if SHIFTED:  # as in ``forward``: sums of numbers about the first of their row are small
        first = tl.load(X + row * stride_x)
    for start in range(0, N, P):
        here = start + cols < N
        x = tl.load(X + row * stride_x + start + cols, mask=here, other=0.0)
        x = x.to(ACC)
        if SHIFTED:
            x = tl.where(here, x - first, 0.0)
        if CENTRED:
            count = tl.minimum(N - start, P)
            chunk_mean = quotient(sum_along(x, 0), count.to(ACC), True)
            centred = tl.where(here, x - chunk_mean, 0.0)
            # Chan, Golub and LeVeque's update for the union of two samples.
            delta = chunk_mean - mean
            share = quotient(count.to(ACC), (start + count).to(ACC), True)
            mean += delta * share
            squares += sum_along(centred * centred, 0) + delta * delta * share * start
        else:
            squares += sum_along(x * x, 0)
    if SHIFTED:
        mean += first
    rstd = inverse_root(quotient(squares, tl.full((), N, ACC), True) + EPS, True)
    if KEEP:
        if CENTRED:
            tl.store(STATS + row, mean)
            tl.store(STATS + M + row, rstd)
        else:
            tl.store(STATS + row, rstd)
    for start in range(0, N, P):
        here = start + cols < N
        y = tl.load(X + row * stride_x + start + cols, mask=here, other=0.0)
        y = (y.to(ACC) - mean) * rstd if CENTRED else y.to(ACC) * rstd
        if HAS_W:
            y = y * tl.load(W + start + cols, mask=here, other=0.0).to(ACC)
        if HAS_B:
            y = y + tl.load(B + start + cols, mask=here, other=0.0).to(ACC)
        tl.store(Y + row * N + start + cols, y.to(Y.dtype.element_ty), mask=here)


@kernel
def backward(
    X,  # (M, N), rows stride_x apart
    DY,  # (M, N), rows stride_dy apart
    W,  # (N,), or anything where not HAS_W
    STATS,  # (2, M): mean and rstd; (1, M): rstd where not CENTRED
    DX,  # (M, N), contiguous
    PART,  # (2, programs, N): what each program saw of dweight and of dbias; (1, …): of dweight
    M,
    N,
    stride_x,
    stride_dy,
    tiles,  # ceil(M / R)
    zero,  # 0
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,  # 2 or more: the next tiles are loaded while one is computed
    HOLD: tl.constexpr,  # the weight stays in registers; else it is fetched with every row
    SHARED: tl.constexpr,  # the rows of a tile add to one sum per column
    PDL: tl.constexpr,  # the second stage may be launched before this one ends
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """dx of every tile, and this program's share of dweight and dbias.

    Program p takes the tiles p, p + programs, … in that order: which rows a partial sum holds, and
    in what order, depends on the number of programs alone.
    """
    SHORT: tl.constexpr = X.dtype.element_ty != tl.float32
    OPAQUE: tl.constexpr = COMPILED and SHORT  # PACKED of the lesson
    # A single column is its own mean: nothing would remain but the rounding of the difference.
    FUSED: tl.constexpr = SHORT and P > 1
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, P)[None, :]
    last = (K - 1) * P + cols < N
    dw = ()
    db = ()
    in_registers = ()
    for k in tl.static_range(K):
        dw = dw + (tl.full((1 if SHARED else R, P), 0.0, ACC),)
        if CENTRED:
            db = db + (tl.full((1 if SHARED else R, P), 0.0, ACC),)
        if HAS_W and HOLD:
            in_registers = in_registers + (columns_of(W, k, K, P, cols, last),)
    if PDL:
        tlc.gdc_launch_dependents()
    for tile in tl.range(program, tiles, programs, num_stages=STAGES):
        rows = tile * R + tl.arange(0, R)
        mean, rstd = statistics_of(STATS, rows, M, CENTRED)
        mean, rstd = mean[:, None] if CENTRED else 0.0, rstd[:, None]
        here = (rows < M)[:, None]
        wide = rows.to(tl.int64)[:, None]  # a tensor may have more than 2**31 elements
        # Each thread reaches all pieces at constant offsets from one address.
        x_at = X + (wide * stride_x + cols)
        dy_at = DY + (wide * stride_dy + cols)
        dx_at = DX + (wide * N + cols)
        x = ()
        dy = ()
        for k in tl.static_range(K):
            mask = here & last if k == K - 1 else here
            x = x + (tl.load(x_at + k * P, mask=mask, other=0.0),)
            dy = dy + (tl.load(dy_at + k * P, mask=mask, other=0.0),)
        weight = in_registers
        if HAS_W and not HOLD:
            weight = ()
            for k in tl.static_range(K):
                weight = weight + (columns_of(W, k, K, P, cols, last),)
        s1 = tl.full((R, P), 0.0, ACC)
        s2 = tl.full((R, P), 0.0, ACC)
        # Always true: it keeps the two passes in separate blocks of code. In one block their
        # instructions mix, and more values are alive at once than there are registers for.
        if tile < tiles:
            for k in tl.static_range(K):
                xhat = normalised(x[k], mean, rstd, FUSED, CENTRED)
                wg = dy[k].to(ACC)
                if HAS_W:
                    wg = wg * weight[k].to(ACC)
                s1 += xhat * wg
                if CENTRED:
                    s2 += wg
        if CENTRED:
            # Both sums at once: one exchange between warps, not two.
            c1, c2 = tl.split(sum_along(tl.join(s1, s2), 1))
            c1 = (c1 / N)[:, None] * rstd
            c2 = (c2 / N)[:, None] * rstd
        else:
            c1 = (sum_along(s1, 1) / N)[:, None] * rstd
        if tile < tiles:
            next_dw = ()
            next_db = ()
            for k in tl.static_range(K):
                again = same_bits(x[k], zero, OPAQUE)
                xhat = normalised(again, mean, rstd, FUSED, CENTRED)
                g = same_bits(dy[k], zero, OPAQUE).to(ACC)
                wg = g
                if HAS_W:
                    wg = g * same_bits(weight[k], zero, OPAQUE and not HOLD).to(ACC)
                if SHARED:
                    next_dw = next_dw + (dw[k] + sum_along(g * xhat, 0)[None, :],)
                    if CENTRED:
                        next_db = next_db + (db[k] + sum_along(g, 0)[None, :],)
                else:
                    next_dw = next_dw + (dw[k] + g * xhat,)
                    if CENTRED:
                        next_db = next_db + (db[k] + g,)
                dx = ((wg * rstd - c2) if CENTRED else wg * rstd) - xhat * c1
                mask = here & last if k == K - 1 else here
                tl.store(dx_at + k * P, dx.to(DX.dtype.element_ty), mask=mask)
            dw = next_dw
            db = next_db
    flat = tl.arange(0, P)
    for k in tl.static_range(K):
        mask = k * P + flat < N
        at = PART + program.to(tl.int64) * N + k * P + flat
        tl.store(at, sum_along(dw[k], 0), mask=mask)
        if CENTRED:
            tl.store(at + programs.to(tl.int64) * N, sum_along(db[k], 0), mask=mask)


@kernel
def backward_sums(
    X,
    DY,
    W,
    STATS,
    SUMS,
    M,
    N,
    stride_x,
    stride_dy,
    P: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """The two sums that dx needs, for rows too wide for the registers: one row per program.

    With v = w dy and bars for means over the row: rstd² mean(xhat v), and rstd mean(v).
    """
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, P)
    mean = tl.load(STATS + row) if CENTRED else 0.0
    s1 = tl.full((P,), 0.0, ACC)
    s2 = tl.full((P,), 0.0, ACC)
    for start in range(0, N, P):
        here = start + cols < N
        x = tl.load(X + row * stride_x + start + cols, mask=here, other=0.0).to(ACC)
        g = tl.load(DY + row * stride_dy + start + cols, mask=here, other=0.0).to(ACC)
        if HAS_W:
            g = g * tl.load(W + start + cols, mask=here, other=0.0).to(ACC)
        s1 += (x - mean) * g
        s2 += g
    rstd = tl.load(STATS + M + row if CENTRED else STATS + row)
    tl.store(SUMS + row, sum_along(s1, 0) / N * rstd * rstd * rstd)
    if CENTRED:
        tl.store(SUMS + M + row, sum_along(s2, 0) / N * rstd)


@kernel
def backward_wide(
    X,
    DY,
    W,
    STATS,
    DX,
    PART,
    SUMS,
    M,
    N,
    stride_x,
    stride_dy,
    tiles,
    R: tl.constexpr,
    P: tl.constexpr,
    CENTRED: tl.constexpr,
    HAS_W: tl.constexpr,
):
    """dx and partial sums of P columns from the sums of the rows: x and dy are read again."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.program_id(1) * P + tl.arange(0, P)[None, :]
    inside = cols < N
    dw = tl.full((R, P), 0.0, ACC)
    db = tl.full((R, P), 0.0, ACC)
    for tile in range(program, tiles, programs):
        rows = tile * R + tl.arange(0, R)
        wide = rows.to(tl.int64)[:, None]
        mask = (rows < M)[:, None] & inside
        c1 = tl.load(SUMS + rows, mask=rows < M, other=0.0)[:, None]
        mean, rstd = statistics_of(STATS, rows, M, CENTRED)
        mean, rstd = mean[:, None] if CENTRED else 0.0, rstd[:, None]
        c2 = tl.load(SUMS + M + rows, mask=rows < M, other=0.0)[:, None] if CENTRED else 0.0
        x = tl.load(X + wide * stride_x + cols, mask=mask, other=0.0).to(ACC)
        g = tl.load(DY + wide * stride_dy + cols, mask=mask, other=0.0).to(ACC)
        dw += (x - mean) * (g * rstd)
        db += g
        if HAS_W:
            g = g * tl.load(W + cols, mask=inside, other=0.0).to(ACC)
        dx = g * rstd - ((x - mean) * c1 + c2)
        tl.store(DX + wide * N + cols, dx.to(DX.dtype.element_ty), mask=mask)
    flat = tl.program_id(1) * P + tl.arange(0, P)
    at = PART + program.to(tl.int64) * N + flat
    tl.store(at, sum_along(dw, 0), mask=flat < N)
    if CENTRED:
        tl.store(at + programs.to(tl.int64) * N, sum_along(db, 0), mask=flat < N)


@kernel
def second_stage(
    PART,  # (2, G, N); (1, G, N) where only dweight is summed
    DW,  # (N,)
    DB,  # (N,), or anything
    G,
    N,
    ROWS: tl.constexpr,
    P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the partial sums of P columns, always in the same order."""
    cols = tl.program_id(0) * P + tl.arange(0, P)
    which = tl.program_id(1)
    if PDL:
        tlc.gdc_wait()
    summed = tl.full((ROWS, P), 0.0, ACC)
    for start in range(0, G, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = PART + (which.to(tl.int64) * G + rows.to(tl.int64)[:, None]) * N + cols[None, :]
        summed += tl.load(at, mask=(rows < G)[:, None] & (cols < N)[None, :], other=0.0)
    result = sum_along(summed, 0)
    if which == 0:
        tl.store(DW + cols, result.to(DW.dtype.element_ty), mask=cols < N)
    else:
        tl.store(DB + cols, result.to(DB.dtype.element_ty), mask=cols < N)
