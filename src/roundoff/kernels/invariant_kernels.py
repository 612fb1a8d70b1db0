"""The Triton kernels behind :func:`roundoff.kernels.matmul` and :func:`roundoff.kernels.attention`.

A row's result depends on its own operands alone, in an order of addition that is the same in every
tile. Attention is compiled without contraction into fused multiply-adds, so that two kernels
with the same operations have the same bits. In float32 a long chain of additions would err more
than cuBLAS's product: sums there are cut into short chains, which are added in order. A product
never takes TF32.
"""

# A language of its own: without starred tuples, and typed by Triton.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton.language as tl

from ._runtime import COMPILED, kernel, max_along, min_along, sum_along


@kernel
def _chain(a, b):
    """The product a b of float32 as a chain of its own.

    Where it is added, the compiler would make of it and the addition one longer chain.
    """
    made = tl.dot(a, b, input_precision="ieee")
    if COMPILED:
        made = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [made], dtype=tl.float32, is_pure=True, pack=1
        )
    return made


@kernel
def product(
    x,  # (batch, M, K), any strides
    w,  # (batch, N, K), any strides
    bias,  # (N,), or anything where not BIAS
    y,  # (batch, M, N), contiguous
    M,
    N,
    K,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_wb,
    stride_wn,
    stride_wk,
    SWAP: tl.constexpr,  # the weight is the left operand: for few rows
    ROWS: tl.constexpr,  # of x in a tile
    COLUMNS: tl.constexpr,  # of y in a tile
    DEPTH: tl.constexpr,  # of K in a step; of float32 in a chain, and chains in a sum
    EVEN: tl.constexpr,  # K is a multiple of DEPTH
    BIAS: tl.constexpr,
):
    """y = x w^T + bias: one chain over K, ascending, for each element; in float32 several."""
    FLOAT: tl.constexpr = x.dtype.element_ty == tl.float32
    GROUP: tl.constexpr = 8  # tiles of rows that follow each other, so that the cache serves them
    tile = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    down, across = (M + ROWS - 1) // ROWS, (N + COLUMNS - 1) // COLUMNS
    group = tile // (GROUP * across)
    high = tl.minimum(down - group * GROUP, GROUP)
    m = (group * GROUP + tile % (GROUP * across) % high) * ROWS + tl.arange(0, ROWS)
    n = (tile % (GROUP * across) // high) * COLUMNS + tl.arange(0, COLUMNS)
    # A row beyond the last is the last again: it needs no mask, and is not stored.
    xs = x + batch * stride_xb + tl.minimum(m, M - 1).to(tl.int64) * stride_xm
    ws = w + batch * stride_wb + tl.minimum(n, N - 1).to(tl.int64) * stride_wn
    k = tl.arange(0, DEPTH)
    first, step_first = (ws, stride_wk) if SWAP else (xs, stride_xk)
    second, step_second = (xs, stride_xk) if SWAP else (ws, stride_wk)
    left = first[:, None] + k[None, :] * step_first
    right = second[None, :] + k[:, None] * step_second
    acc = tl.full((first.shape[0], second.shape[0]), 0.0, tl.float32)
    part = tl.full(acc.shape, 0.0, tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=(k < K - start)[None, :], other=0.0)
            b = tl.load(right, mask=(k < K - start)[:, None], other=0.0)
        if FLOAT:
            part += _chain(a, b)
            full = start // DEPTH % DEPTH == DEPTH - 1
            acc = tl.where(full, acc + part, acc)
            part = tl.where(full, 0.0, part)
        else:
            acc = tl.dot(a, b, acc)
        left += DEPTH * step_first
        right += DEPTH * step_second
    if FLOAT:
        acc += part
    if BIAS:
        b = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        acc += b[:, None] if SWAP else b[None, :]
    row = m[None, :] if SWAP else m[:, None]
    column = n[:, None] if SWAP else n[None, :]
    at = y + batch * M * N + row.to(tl.int64) * N + column
    tl.store(at, acc.to(y.dtype.element_ty), mask=(row < M) & (column < N))


@kernel
def _halves(x):
    """The first and the last columns of x."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@kernel
def _short_scores(q, k, inside_q, inside_k, head, stride_qd, stride_kd):
    """q k^T in float32: each 16 values of a head are a chain, added in order."""
    scores = tl.full((q.shape[0], k.shape[0]), 0.0, tl.float32)
    for start in range(0, head, 16):
        d = start + tl.arange(0, 16)
        inside = (d < head)[None, :]
        queries = tl.load(q + d[None, :] * stride_qd, mask=inside_q & inside, other=0.0)
        keys = tl.load(k + d[None, :] * stride_kd, mask=inside_k & inside, other=0.0)
        scores += _chain(queries, tl.trans(keys))
    return scores


@kernel
def _short_sum(acc, p, v, start, rank, head, stride_vn, stride_vd, D: tl.constexpr):
    """acc + p v in float32 for 16 keys: a chain of their own."""
    d, j = tl.arange(0, D), start + tl.arange(0, 16)
    at = j.to(tl.int64)
    inside = (j < rank)[:, None] & (d < head)[None, :]
    values = tl.load(v + at[:, None] * stride_vn + d[None, :] * stride_vd, mask=inside, other=0.0)
    values = tl.where((values == values) & (tl.abs(values) != float("inf")), values, 0.0)
    return acc + _chain(p, values)


@kernel
def _merged(acc, total, most, acc_s, total_s, most_s):
    """Two splits as one, the earlier first; one without keys changes nothing."""
    higher = tl.maximum(most, most_s)
    floor = tl.where(higher == float("-inf"), 0.0, higher)
    one, two = tl.math.exp2(most - floor)[:, None], tl.math.exp2(most_s - floor)[:, None]
    empty, first = (most_s == float("-inf"))[:, None], (most == float("-inf"))[:, None]
    both = acc * one + acc_s * two
    acc = tl.where(empty, acc, tl.where(first, acc_s, both))
    sums = total * one + total_s * two
    total = tl.where(empty, total, tl.where(first, total_s, sums))
    return acc, total, higher


@kernel
def _ended(acc, total, most, acc_s, total_s, most_s, mine, FLOAT: tl.constexpr):
    """The splits so far and one whose tiles are done, of the rows that it belongs to."""
    if FLOAT:
        ones = tl.full((16, 16), 1.0, tl.float32)
        total_s = tl.dot(total_s, ones, input_precision="ieee")  # one of the 16 chains
    most_s = tl.where(mine, most_s, float("-inf"))
    return _merged(acc, total, most, acc_s, total_s, most_s)


@kernel
def _store(partial, stats, place, mine, acc, sums, most, head, D: tl.constexpr):
    """What a split has of some rows."""
    d = tl.arange(0, D)
    inside = mine[:, None] & (d < head)[None, :]
    tl.store(partial + place[:, None] * head + d[None, :], acc, mask=inside)
    tl.store(stats + place * 2, most, mask=mine)
    tl.store(stats + place * 2 + 1, sums, mask=mine)


@kernel
def attend(
    q,  # (batch, heads, queries, head), any strides
    k,  # (batch, groups, keys, head), any strides
    v,  # (batch, groups, keys, head), any strides
    first,  # (batch, queries): the first key that a query sees
    last,  # (batch, queries): the one after the last
    out,  # (batch, heads, queries, head), contiguous; anything where splits are apart
    partial,  # (splits, rows, head) float32: results of splits; anything where they are together
    stats,  # (splits, rows, 2) float32: largest score and sum; anything where they are together
    each,  # splits of a program, where they are apart
    queries,
    keys,
    heads,
    groups,
    head,
    scale,  # of the scores, times log2(e)
    scale_low,  # what its rounding to float32 took away, times log(2)
    stride_qb,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_vd,
    D: tl.constexpr,  # head, up to a power of two
    ROWS: tl.constexpr,  # queries times heads of a group in a tile
    TILE: tl.constexpr,  # keys of a tile
    SPLIT: tl.constexpr,  # keys of a split, a multiple of TILE
    MANY: tl.constexpr,  # whether a program takes several splits that are apart
):
    """Attention of one tile of rows: splits of keys one after another, or some of them.

    Where the grid has a second direction, a program takes `each` splits and stores them for
    :func:`merge`. All numbers of splits and of keys run the same two compiled kernels.
    """
    FLOAT: tl.constexpr = q.dtype.element_ty == tl.float32
    apart = tl.num_programs(1) > 1
    share = heads // groups
    blocks = (queries * share + ROWS - 1) // ROWS
    block, part = tl.program_id(0) % blocks, tl.program_id(1)
    which = tl.program_id(0) // blocks
    batch, group = (which // groups).to(tl.int64), (which % groups).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    there = row < queries * share
    query, h = (row // share).to(tl.int64), group * share + row % share
    d = tl.arange(0, D)
    inside = there[:, None] & (d < head)[None, :]
    at = batch * stride_qb + h[:, None] * stride_qh + query[:, None] * stride_qm
    places = q + at
    tokens = tl.load(places + d[None, :] * stride_qd, mask=inside, other=0.0)
    lo = tl.load(first + batch * queries + query, mask=there, other=0)
    hi = tl.load(last + batch * queries + query, mask=there, other=0)
    k += batch * stride_kb + group * stride_kh
    v += batch * stride_vb + group * stride_vh
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    total = tl.full((ROWS, 16), 0.0, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    none = acc, total, most
    inside_head = (d < head)[None, :]
    # Tiles and splits are counted from a row's first key. Rows that begin alike go together: in
    # a sequence they all do; with a sliding window each begins elsewhere.
    waiting = there & (lo < hi)
    flat = (batch * heads + h) * queries + query
    count = (tl.num_programs(0) // (blocks * groups)).to(tl.int64) * heads * queries
    if MANY:
        # What splits without keys that a row sees have; that of others is stored over it.
        nothing = tl.where(hi < 0, float("nan"), 0.0)
        lowest = tl.where(hi < 0, 0.0, float("-inf"))
        for i in range(part * each, tl.minimum((part + 1) * each, (keys + SPLIT - 1) // SPLIT)):
            tl.store(stats + (i * count + flat) * 2, lowest, mask=there)
            tl.store(stats + (i * count + flat) * 2 + 1, nothing, mask=there)
        tl.debug_barrier()
    anchor = min_along(tl.where(waiting, lo, 2147483647), 0)
    while anchor < 2147483647:
        mine = waiting & (lo == anchor)
        end = max_along(tl.where(mine, hi, 0), 0)  # the last key of any row
        least = min_along(tl.where(mine, hi, 2147483647), 0)  # all rows see those before it
        # Rows of another beginning are none here; rows beyond the last count as none.
        alone = max_along((there & (lo != anchor)).to(tl.int32), 0) == 0
        least = tl.where(alone, least, 0)
        start = anchor + part * (each * SPLIT)
        stop = tl.where(apart, tl.minimum(end, start + each * SPLIT), end)
        # With several splits one loop over the tiles of all: loads go on across a split's end.
        width = tl.maximum(stop - start, 1) if MANY else SPLIT
        for split in range(start, stop, width):
            # Tiles of keys into the running sums of a split (online softmax).
            limit = tl.minimum(stop, split + width)
            acc_s, total_s, most_s = none
            first_masked = split
            if not FLOAT:  # its products take the time, and twice as long to compile twice
                first_masked += tl.maximum(tl.minimum(limit, least) - split, 0) // TILE * TILE
            for MASKED in tl.static_range(1 if FLOAT else 0, 2):
                low = first_masked if MASKED else split
                for tile in range(low, limit if MASKED else first_masked, TILE):
                    j = tile + tl.arange(0, TILE)
                    exists = j < limit
                    key = j.to(tl.int64)
                    loaded = inside_head
                    if MASKED:
                        loaded = exists[:, None] & inside_head
                    keys_at = k + key[:, None] * stride_kn
                    if FLOAT:
                        masks = mine[:, None], exists[:, None]
                        products = _short_scores(
                            places, keys_at, *masks, head, stride_qd, stride_kd
                        )
                    else:
                        loads = tl.load(keys_at + d[None, :] * stride_kd, mask=loaded, other=0.0)
                        products = tl.dot(tokens, tl.trans(loads))
                    scores = products * scale
                    seen = (j[None, :] >= lo[:, None]) & (j[None, :] < hi[:, None]) & mine[:, None]
                    if MASKED:
                        scores = tl.where(seen, scores, float("-inf"))
                    higher = tl.maximum(most_s, max_along(scores, 1))
                    # A row that has seen no key yet has no largest score to subtract.
                    floor = tl.where(higher == float("-inf"), 0.0, higher)
                    exponents = scores - floor[:, None]
                    if FLOAT:
                        zeros = tl.full(products.shape, 0.0, tl.float32)
                        # Rounded once.
                        exponents = tl.fma(products, zeros + scale, zeros - floor[:, None])
                        exponents = tl.where(seen, exponents, float("-inf"))
                    p = tl.math.exp2(exponents)
                    if FLOAT:  # what rounding took from the scale moves a row's weights alike
                        p = tl.where(p == 0.0, p, tl.fma(p, products * scale_low, p))
                    shrink = tl.math.exp2(most_s - floor)[:, None]
                    values_at = v + key[:, None] * stride_vn + d[None, :] * stride_vd
                    values = tl.load(values_at, mask=loaded, other=0.0)
                    clean = values
                    if MASKED:
                        # Zero times a NaN that a row must not see would reach it all the same.
                        finite = (values == values) & (tl.abs(values) != float("inf"))
                        clean = tl.where(finite, values, 0.0).to(values.dtype)
                    rounded = p.to(values.dtype)
                    if FLOAT:
                        # A chain over hundreds of keys would err more than torch: each 16 keys
                        # are a chain, and the weights are added up in 16 chains of keys 16 apart.
                        front, back = _halves(rounded)
                        one, two = _halves(front)
                        three, four = _halves(back)
                        total_s = total_s * shrink + one + two + three + four
                        rest = limit, head, stride_vn, stride_vd
                        acc_s = _short_sum(acc_s * shrink, one, v, tile, *rest, D)
                        acc_s = _short_sum(acc_s, two, v, tile + 16, *rest, D)
                        acc_s = _short_sum(acc_s, three, v, tile + 32, *rest, D)
                        acc_s = _short_sum(acc_s, four, v, tile + 48, *rest, D)
                    else:
                        # The same product adds the weights up: a sum over a tile has no order of
                        # its own.
                        ones = tl.full((TILE, 16), 1.0, values.dtype)
                        total_s = tl.dot(rounded, ones, total_s * shrink)
                        acc_s = tl.dot(rounded, clean, acc_s * shrink)
                    if MASKED:  # noqa: SIM102 - the compiler's question, not the kernel's
                        if max_along(max_along((~finite).to(tl.int32), 1), 0) > 0:
                            # What infinities and NaN of the tile are to those who see them.
                            column = tl.arange(0, TILE)[None, :]
                            for i in range(tl.minimum(limit - tile, TILE)):
                                here = (tile + i >= lo) & (tile + i < hi) & mine
                                row_at = v + tl.cast(tile + i, tl.int64) * stride_vn
                                value = tl.load(row_at + d * stride_vd, mask=d < head, other=0.0)
                                value = tl.where(d < head, value.to(tl.float32), 0.0)
                                bad = (value != value) | (tl.abs(value) == float("inf"))
                                weights = tl.where(column == i, rounded.to(tl.float32), 0.0)
                                added = sum_along(weights, 1)[:, None] * value[None, :]
                                acc_s += tl.where(here[:, None] & bad[None, :], added, 0.0)
                    most_s = higher
                    if MANY:
                        done = tile - anchor + TILE
                        if (done % SPLIT == 0) | (done >= limit - anchor):
                            a, t, m = _ended(*none, acc_s, total_s, most_s, mine, FLOAT)
                            place = (done - 1) // SPLIT * count + flat
                            _store(partial, stats, place, mine, a, max_along(t, 1), m, head, D)
                            acc_s, total_s, most_s = none
            if not MANY:
                acc, total, most = _ended(acc, total, most, acc_s, total_s, most_s, mine, FLOAT)
        waiting = waiting & (lo != anchor)
        anchor = min_along(tl.where(waiting, lo, 2147483647), 0)
    # All columns are equal. A row that was refused ends below zero, and is no number.
    sums = tl.where(hi < 0, float("nan"), max_along(total, 1))
    most = tl.where(hi < 0, 0.0, most)
    if MANY:
        pass
    elif apart:
        _store(partial, stats, part * count + flat, there, acc, sums, most, head, D)
    else:
        divisor = tl.where(sums == 0, 1.0, sums)[:, None] + tl.full((ROWS, D), 0.0, tl.float32)
        y = tl.div_rn(acc, divisor) + 0.0  # a zero has no sign: later tiles of others take it away
        tl.store(out + flat[:, None] * head + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@kernel
def merge(
    partial,  # (splits, M, head) float32
    stats,  # (splits, M, 2) float32
    out,  # (M, head)
    M,
    head,
    splits,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,  # that are loaded at a time: a load takes longer than a sum
):
    """The splits of each row, in ascending order."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    d = tl.arange(0, D)
    there = row < M
    inside = there[:, None] & (d < head)[None, :]
    acc = tl.full((ROWS, D), 0.0, tl.float32)
    total = tl.full((ROWS, 1), 0.0, tl.float32)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(0, splits if SPLITS > 2 else 1, SPLITS):  # two at a time are all
        parts = ()
        for i in tl.static_range(SPLITS):
            known = there & (first + i < splits)
            at = (first + i) * M.to(tl.int64) + row
            most_s = tl.load(stats + at * 2, mask=known, other=float("-inf"))
            total_s = tl.load(stats + at * 2 + 1, mask=known, other=0.0)
            acc_at = partial + at[:, None] * head + d[None, :]
            acc_s = tl.load(acc_at, mask=known[:, None] & (d < head)[None, :], other=0.0)
            parts = parts + ((acc_s, total_s[:, None], most_s),)
        for i in tl.static_range(SPLITS):
            acc, total, most = _merged(acc, total, most, *parts[i])
    wide = tl.where(total == 0, 1.0, total) + tl.full((ROWS, D), 0.0, tl.float32)
    y = tl.div_rn(acc, wide) + 0.0  # as above
    tl.store(out + row[:, None] * head + d[None, :], y.to(out.dtype.element_ty), mask=inside)


@kernel
def sum_rows(
    x,  # (M, n), rows stride apart
    out,  # (M,)
    n,
    stride,
    divisor,
    BLOCK: tl.constexpr,
):
    """The sum of each row over a divisor: one program a row, blocks of columns in order."""
    row = tl.program_id(0).to(tl.int64)
    acc = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        acc += tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
    total = sum_along(acc, 0)
    tl.store(out + row, tl.div_rn(total, divisor).to(out.dtype.element_ty))


@kernel
def rms_rows(
    x,  # (M, n), rows stride apart
    w,  # (n,)
    out,  # (M, n), contiguous
    n,
    stride,
    divisor,
    eps,
    FIRST: tl.constexpr,  # round before the weights, too
    ONE: tl.constexpr,  # weights to which one is added
    BLOCK: tl.constexpr,
):
    """The RMSNorm of each row: one program a row, blocks of columns in order."""
    row = tl.program_id(0).to(tl.int64)
    acc = tl.full((BLOCK,), 0.0, tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32)
        acc += value * value
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_along(acc, 0), divisor) + eps))
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        made = tl.load(x + row * stride + at, mask=at < n, other=0.0).to(tl.float32) * scale
        if FIRST:
            made = made.to(out.dtype.element_ty).to(tl.float32)
        weight = tl.load(w + at, mask=at < n, other=0.0).to(tl.float32)
        made = made * (weight + 1.0 if ONE else weight)
        tl.store(out + row * n + at, made.to(out.dtype.element_ty), mask=at < n)
