r"""
.. _layer-norm-ladder:

How do I write a fast LayerNorm backward in Triton?
===================================================

A first backward kernel takes several times as long as memory needs. Three steps lead to a fast one.

.. answer:: nvidia-h200

   **Why.** A LayerNorm backward computes little, so it should reach the rate of a kernel that only
   moves the same bytes. But for rows of 8704 numbers of float16, a backward with atomic additions
   reaches :bound:`12 % <atomic>` of that rate. PyTorch's reaches :bound:`34 % <torch>`. Atomics,
   padded blocks that spill, and waiting for loads cost time.

   **The cure.** Add the gradients of weight and bias in two stages. Cut each row into pieces. Load
   the next rows early. Together the three steps reach :bound:`79 % <prefetch>`,
   and 84 % in the second run.

   **The price.** Each program holds its sums of all columns in registers. At 32,768 columns they do
   not fit: the kernel, without early loads, reaches :bound:`16 % <wide.packed>`, and PyTorch
   :bound:`36 % <wide.torch>`.

   .. code-block:: python

      # with this page's kernels, and a program for each of 132 multiprocessors
      (M, N), programs = x.shape, 132
      dx, part = torch.empty_like(x), mean.new_empty(2 * programs, N)
      sums = mean.new_empty(2, N)  # dw and db
      pieces_backward[(programs,)](
          x, dy, w, mean, rstd, dx, part, M, N, end=M, zero=0,
          R=1, P=2048, K=-(-N // 2048), STAGES=3,
          PACKED=x.is_cuda and x.itemsize == 2, num_warps=8)
      add_partial_sums[(-(-N // 16), 2)](part, sums, programs, N, R=256, P=16)
"""

# %%
# Every cell runs on a laptop in seconds: without a GPU, Triton's interpreter runs the kernels on
# small tensors. A bold number was recorded on an H200, unless its sentence names another GPU: click
# it for its evidence.

from contextlib import nullcontext

import matplotlib.pyplot as plt
import pandas as pd
import torch
import triton
import triton.language as tl
from torch.nn import functional

from roundoff.compare import digest, scaled_error
from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels.ahead import Compile, compiled_ahead
from roundoff.kernels.lessons import kernel, same_bits, sum_along
from roundoff.record import read_table

# %%
# A program takes a row
# ---------------------
#
# LayerNorm subtracts the mean of each row, divides by its standard deviation, multiplies by a
# weight and adds a bias. In Triton's words:
#
# * A *program* is a thread block. ``kernel[(m,)](…)`` starts m programs, and ``tl.program_id(0)``
#   is a program's own number.
# * A *block* is an array that the threads of a program hold in their registers. Its length is a
#   power of two. ``tl.arange(0, P)`` is a block of P numbers.
# * A tensor argument is a pointer. ``tl.load(X + cols, mask=…)`` reads a block and skips what is
#   masked.
#
# On a GPU, ``@kernel`` is ``@triton.jit``, and ``sum_along(x, 0)`` is ``tl.sum(x, 0)``. Without a
# GPU, ``@kernel`` interprets, and ``sum_along`` adds in a fixed order of its own.

C = tl.constexpr  # a constant of the compiler, as a template parameter in C++


@kernel
def row_forward(X, W, B, Y, MEAN, RSTD, N, EPS: C, P: C):
    row = tl.program_id(0)
    cols = tl.arange(0, P)
    here = cols < N
    x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
    mean = sum_along(x, 0) / N
    centred = tl.where(here, x - mean, 0.0)
    rstd = 1 / tl.sqrt(sum_along(centred * centred, 0) / N + EPS)
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    b = tl.load(B + cols, mask=here, other=0.0).to(tl.float32)
    y = centred * rstd * w + b
    tl.store(Y + row * N + cols, y.to(Y.dtype.element_ty), mask=here)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


# %%
# We run this forward, and compare it with float64. The :ref:`unit <unit>` of an error is float32's
# ε times the root mean square of the exact result. An error near 1 is rounding.

device, programs = ("cpu", 4) if interpreting() else ("cuda", 132)
m, n, piece = (12, 48, 16) if interpreting() else (4096, 8704, 2048)
generator = torch.Generator(device).manual_seed(n)
x = 0.5 * torch.randn(m, n, generator=generator, device=device) - 2.3
dy = 0.1 * torch.randn(m, n, generator=generator, device=device)
w, b = (torch.rand(n, generator=generator, device=device) for _ in "wb")

y, mean, rstd = torch.empty_like(x), x.new_empty(m), x.new_empty(m)
block = triton.next_power_of_2(n)
row_forward[(m,)](x, w, b, y, mean, rstd, n, EPS=1e-5, P=block, num_warps=8)
wide = [t.double().requires_grad_() for t in (x, w, b)]
exact = functional.layer_norm(wide[0], (n,), wide[1], wide[2])
print(f"typical error: {scaled_error(exact.detach(), y).rms:.2f}")

# %%
# A forward is easy: no row needs another row. A backward is not.
#
# The first backward is far from memory's rate
# --------------------------------------------
#
# The backward gives three gradients. *dx* has the shape of the rows. *dw* and *db* are sums over
# all rows. Let :math:`\hat x` be the normalized row, :math:`r` one over its standard deviation, and
# :math:`g` the incoming gradient. A bar is a mean over the row:
#
# .. math:: dx = r\,(w g - \overline{w g} - \hat x\, \overline{\hat x\, w g}), \quad
#           dw = \sum g\, \hat x, \quad db = \sum g.
#
# The first idea: each program adds its row to the same sums in memory. An *atomic* addition reads,
# adds and writes, and no other program comes in between.


@kernel
def atomic_backward(X, DY, W, MEAN, RSTD, DX, SUMS, N, P: C):
    row = tl.program_id(0)
    cols = tl.arange(0, P)
    here = cols < N
    x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
    g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    rstd = tl.load(RSTD + row)
    xhat = (x - tl.load(MEAN + row)) * rstd
    c1 = sum_along(xhat * w * g, 0) / N  # beyond the row g is 0
    c2 = sum_along(w * g, 0) / N
    dx = rstd * (w * g - c2 - xhat * c1)
    tl.store(DX + row * N + cols, dx.to(DX.dtype.element_ty), mask=here)
    tl.atomic_add(SUMS + cols, g * xhat, mask=here)  # in the order in which programs come
    tl.atomic_add(SUMS + N + cols, g, mask=here)


# %%
# We run this kernel eight times on one input. A GPU runs programs in no fixed order, and the
# interpreter shuffles them. ``show`` will also run each next step.


def with_atomics(x, dy, w, mean, rstd):
    M, N = x.shape
    dx, sums = torch.empty_like(x), mean.new_zeros(2, N)
    arguments = x, dy, w, mean, rstd, dx, sums, N
    atomic_backward[(M,)](*arguments, P=triton.next_power_of_2(N), num_warps=8)
    return dx, *sums


def show(name, backward):
    results = []
    for seed in range(8):
        with shuffled_programs(seed) if interpreting() else nullcontext():
            results.append(backward(x, dy, w, mean, rstd))
    gradients = torch.autograd.grad(exact, wide, dy.double(), retain_graph=True)
    pairs = zip(gradients, results[0], strict=True)
    errors = " ".join(f"{scaled_error(truth, result).rms:.2f}" for truth, result in pairs)
    different = len({digest(dw) for _, dw, _ in results})
    print(f"{name:10}  errors of dx, dw, db: {errors}  different dw: {different}")


show("atomics", with_atomics)

# %%
# The gradients are right, up to rounding. But dw has several results: the order of the additions
# changes from run to run. On the H200, 20 runs gave :bound:`20 <orders>` different dw.
#
# The kernel is slow, too. *What memory allows* is the rate of a kernel that reads and writes the
# same bytes and computes nothing. For 4096 rows of 8704 numbers in float16, the backward with
# atomics reaches :bound:`12 % <atomic>` of that rate.
#
# It is not the atomics alone
# ---------------------------
#
# The usual advice is to avoid atomics, and to add in two stages. A fixed number of programs share
# the rows: program p takes rows p, p + programs, p + 2 · programs, and so on. Each program keeps
# its own dw and db in registers.


@kernel
def simple_backward(X, DY, W, MEAN, RSTD, DX, PART, M, N, P: C):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, P)
    here = cols < N
    w = tl.load(W + cols, mask=here, other=0.0).to(tl.float32)
    dw, db = tl.full((P,), 0.0, tl.float32), tl.full((P,), 0.0, tl.float32)
    for row in range(program, M, programs):  # always in this order
        x = tl.load(X + row * N + cols, mask=here, other=0.0).to(tl.float32)
        g = tl.load(DY + row * N + cols, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = tl.where(here, (x - tl.load(MEAN + row)) * rstd, 0.0)
        c1, c2 = sum_along(xhat * w * g, 0) / N, sum_along(w * g, 0) / N
        dx = rstd * (w * g - c2 - xhat * c1)
        tl.store(DX + row * N + cols, dx.to(DX.dtype.element_ty), mask=here)
        dw += g * xhat
        db += g
    tl.store(PART + program * N + cols, dw, mask=here)
    tl.store(PART + (programs + program) * N + cols, db, mask=here)


# %%
# At its end each program writes one partial sum of dw and one of db. A second kernel adds these,
# also in a fixed order.


@kernel
def add_partial_sums(PART, OUT, G, N, R: C, P: C):
    which = tl.program_id(1)  # 0: dw, 1: db
    rows = tl.arange(0, R)
    cols = tl.program_id(0) * P + tl.arange(0, P)
    here = (rows < G)[:, None] & (cols < N)[None, :]
    at = (which * G + rows)[:, None] * N + cols[None, :]
    part = tl.load(PART + at, mask=here, other=0.0)
    tl.store(OUT + which * N + cols, sum_along(part, 0), mask=cols < N)


# %%


def added(part):
    N = part.shape[1]
    sums = part.new_empty(2, N)
    add_partial_sums[(triton.cdiv(N, 16), 2)](part, sums, programs, N, R=256, P=16)
    return sums


def in_two_stages(x, dy, w, mean, rstd):
    M, N = x.shape
    dx, part = torch.empty_like(x), mean.new_empty(2 * programs, N)
    arguments = x, dy, w, mean, rstd, dx, part, M, N
    simple_backward[(programs,)](*arguments, P=triton.next_power_of_2(N), num_warps=8)
    return dx, *added(part)


show("two stages", in_two_stages)

# %%
# Every run now has the same bits. Two stages reach :bound:`34 % <stages>` of what memory allows.
# Two thirds of the time are still lost, so atomics were not the only cause.
#
# A block that is too large spills
# --------------------------------
#
# A thread has at most 255 registers. What finds no register is *spilled*: written to memory and
# read back. The compiler counts the registers that a thread uses and the 32-bit words that it
# spills. It needs no GPU. Here it compiles for an H100 or an H200, with 256 threads (8 warps) a
# program.

widths = [4096, 8192, 8704]
blocks = [triton.next_power_of_2(columns) for columns in widths]
launches = [Compile(simple_backward, 8, {"P": block}) for block in blocks]
table = pd.DataFrame(compiled_ahead(launches), index=pd.Index(widths, name="columns"))
table.insert(0, "block", blocks)
table[["block", "registers", "spilled"]]

# %%
# 8192 columns spill nothing. 8704 columns are only 512 more, but the next power of two is 16,384.
# Nearly half of this block is padding, and padding takes registers, too. So the block spills.
#
# Cut the row into pieces, and the spills go
# ------------------------------------------
#
# Five pieces of 2048 hold 8704 columns with little padding. Triton has no list of blocks, so we use
# a tuple, and a loop that the compiler unrolls (``tl.static_range``). ``load_vector`` reads a
# vector in K pieces of P numbers. ``load_rows`` reads R rows of x and of dy, and here R is 1. Only
# the last piece needs a mask.


@kernel
def load_vector(W, N, P: C, K: C):
    cols, pieces = tl.arange(0, P)[None, :], ()
    for k in tl.static_range(K):
        if k == K - 1:  # only the last piece may end beyond the vector
            inside = k * P + cols < N
            pieces = pieces + (tl.load(W + cols + k * P, mask=inside, other=0.0),)
        else:
            pieces = pieces + (tl.load(W + cols + k * P),)
    return pieces


@kernel
def load_rows(X, DY, at, here, last, P: C, K: C):
    x, dy = (), ()
    for k in tl.static_range(K):
        mask = here & last if k == K - 1 else here
        x = x + (tl.load(X + at + k * P, mask=mask, other=0.0),)
        dy = dy + (tl.load(DY + at + k * P, mask=mask, other=0.0),)
    return x, dy


# %%
# Each row is used twice: for its two means, and then for the gradients. ``same_bits`` returns x
# unchanged: the third step says why.


@kernel
def row_means(x, dy, w, mean, rstd, N, R: C, P: C, K: C):
    s1 = tl.full((R, P), 0.0, tl.float32)
    s2 = tl.full((R, P), 0.0, tl.float32)
    for k in tl.static_range(K):
        wg = w[k].to(tl.float32) * dy[k].to(tl.float32)
        s1 += (x[k].to(tl.float32) - mean) * rstd * wg
        s2 += wg
    return (sum_along(s1, 1) / N)[:, None], (sum_along(s2, 1) / N)[:, None]


@kernel
def piece_backward(x, dy, w, mean, rstd, c1, c2, zero, PACKED: C):
    xhat = (same_bits(x, zero, PACKED).to(tl.float32) - mean) * rstd
    g = same_bits(dy, zero, PACKED).to(tl.float32)
    dx = rstd * (w.to(tl.float32) * g - c2 - xhat * c1)
    return dx, sum_along(g * xhat, 0)[None, :], sum_along(g, 0)[None, :]


# %%
# ``zeros`` makes the zeros that the sums begin with. ``store_sums`` stores the partial sums at the
# end.


@kernel
def zeros(P: C, K: C):
    pieces = ()
    for _ in tl.static_range(K):
        pieces = pieces + (tl.full((1, P), 0.0, tl.float32),)
    return pieces


@kernel
def store_sums(PART, dw, db, program, programs, N, P: C, K: C):
    cols = tl.arange(0, P)[None, :]
    for k in tl.static_range(K):
        inside = k * P + cols < N
        tl.store(PART + program * N + k * P + cols, dw[k], mask=inside)
        tl.store(PART + (programs + program) * N + k * P + cols, db[k], mask=inside)


# %%
# ``pieces_backward`` does what ``simple_backward`` did, with tuples in place of blocks. It takes a
# *tile* of R rows at a time, and ``end`` is the number of tiles.


@kernel
def pieces_backward(
    X, DY, W, MEAN, RSTD, DX, PART, M, N, end, zero, R: C, P: C, K: C, PACKED: C, STAGES: C
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, P)[None, :]
    w, dw, db = load_vector(W, N, P, K), zeros(P, K), zeros(P, K)
    for tile in tl.range(program, end, programs, num_stages=STAGES):
        rows = (tile * R + tl.arange(0, R))[:, None]
        mean = tl.load(MEAN + rows, mask=rows < M, other=0.0)
        rstd = tl.load(RSTD + rows, mask=rows < M, other=0.0)
        at = rows * N + cols
        x, dy = load_rows(X, DY, at, rows < M, (K - 1) * P + cols < N, P, K)
        c1, c2 = row_means(x, dy, w, mean, rstd, N, R, P, K)
        next_dw, next_db = (), ()
        for k in tl.static_range(K):
            made = piece_backward(x[k], dy[k], w[k], mean, rstd, c1, c2, zero, PACKED)
            tl.store(DX + at + k * P, made[0], mask=(rows < M) & (k * P + cols < N))
            next_dw, next_db = next_dw + (dw[k] + made[1],), next_db + (db[k] + made[2],)
        dw, db = next_dw, next_db
    store_sums(PART, dw, db, program, programs, N, P, K)


# %%


def in_pieces(x, dy, w, mean, rstd, packed=False, stages=1):
    M, N = x.shape
    dx, part = torch.empty_like(x), mean.new_empty(2 * programs, N)
    arguments = x, dy, w, mean, rstd, dx, part, M, N
    sizes = {"end": M, "zero": 0, "R": 1, "P": piece, "K": triton.cdiv(N, piece)}
    how = {"PACKED": packed, "STAGES": stages, "num_warps": 8}
    pieces_backward[(programs,)](*arguments, **sizes, **how)
    return dx, *added(part)


show("pieces", in_pieces)

# %%
# The errors stay within rounding. Now we compile the same 8704 columns in pieces of three sizes.

sizes = [16384, 4096, 2048]
counts = [triton.cdiv(8704, size) for size in sizes]
fixed = {"R": 1, "PACKED": False, "STAGES": 1}
pairs = zip(sizes, counts, strict=True)
launches = [Compile(pieces_backward, 8, {"P": P, "K": K, **fixed}) for P, K in pairs]
held = pd.DataFrame(compiled_ahead(launches), index=sizes)
held["row"], held["padding"] = 8704, held.index * counts - 8704

title = "A row in its pieces, and the words that a thread spills"
ax = held[["row", "padding"]].plot.barh(stacked=True, figsize=(7, 2.1), title=title)
labels = [f"{words} spilled" for words in held["spilled"]]
ax.bar_label(ax.containers[1], labels, padding=3)
ax.set(xlim=(0, 20000), ylabel="piece length")
ax.figure.set_label(f"Padding, by length of a piece: {held['padding'].to_dict()}")
plt.show()

# %%
# One piece of 16,384 spills in this kernel, too. Five pieces of 2048 spill nothing, and hold little
# padding. On the H200 pieces reach :bound:`62 % <pieces>`, where two stages reached
# :bound:`34 % <stages>`.
#
# Spills and padding are the cause. At 4096 columns two stages have neither, and pieces gain little:
# :bound:`46 % <narrow.pieces>` against :bound:`44 % <narrow.stages>`. Both cost:
# :ref:`triton-layer-norm` times this kernel at 8192 columns, with neither, and at 15,872, with the
# same spills and little padding.
#
# Load the next row early
# -----------------------
#
# A program asks for a row and waits. If waiting costs time, a second program on the
# :term:`multiprocessor` helps: it computes during the wait. At 4096 columns the registers hold two
# programs. There one program reaches :bound:`44 % <narrow.packed>`, and two reach
# :bound:`60 % <narrow.two>`. (Both are packed: see below.)
#
# At 8704 columns one program takes all registers. So this program has to ask earlier. With
# ``tl.range(…, num_stages=3)`` a program asks for the next two rows before it works on this one.
# The next rows wait in shared memory. The third step is the same kernel, launched with
# ``STAGES=3``.
#
# Between its two uses a row stays in registers, converted to float32. Packing keeps the 16 bits of
# float16 or bfloat16 instead. With ``PACKED=True``, ``same_bits`` returns x XOR ``zero``. The
# compiler cannot know that ``zero`` is 0, so it keeps 16 bits and converts twice.


def prefetched(x, dy, w, mean, rstd):
    packed = x.element_size() == 2 and not interpreting()
    return in_pieces(x, dy, w, mean, rstd, packed=packed, stages=3)


show("prefetch", prefetched)

# %%
# An early load changes no arithmetic, so the errors are those of pieces. On the H200 the third step
# reaches :bound:`79 % <prefetch>`, and 84 % in the second run. On the H100 it reaches
# :bound:`90 % <prefetch@nvidia-h100-80gb-hbm3>`, and 88 % in the second run.
#
# Packing alone lowers :bound:`62 % <pieces>` to :bound:`58 % <packed>`. The early load then raises
# :bound:`58 % <packed>` to :bound:`79 % <prefetch>`. Prefetch without packing spills nothing
# either, but was not timed. Packing pays at 32,768 columns, without early loads:
# :bound:`16 % <wide.packed>` against :bound:`6.6 % <wide.pieces>`.
#
# How much each step gains
# ------------------------
#
# Each kernel ran on 4096 rows of float16, from a :term:`CUDA graph`, on buffers larger than the
# cache, on the H200. Each column is a row length. Numbers are percent of what memory allows. At
# 32,768 columns the steps from *atomic* to *packed* run with 16 warps, and a piece has 4096
# numbers.
#
# * *packed* is pieces with ``PACKED=True``;
# * *two programs* is packed, with two programs for each multiprocessor;
# * *prefetch* is packed with ``STAGES=3``, the third step;
# * *read twice* keeps no row: it reads a row for its means, and again for the gradients;
# * *roundoff* is the backward of :func:`roundoff.kernels.layer_norm`, a longer kernel.
#
# An empty cell: the step does not fit into registers or shared memory.


STEPS = ["torch", "atomic", "two stages", "pieces", "packed"]
STEPS += ["two programs", "prefetch", "read twice", "roundoff"]
WIDTHS = [4096, 8704, 32768]
rates = read_table("plot_layer_norm_ladder", "nvidia-h200", "backward", ["step", "N", "of ceiling"])
rates = 100 * rates.pivot(index="step", columns="N", values="of ceiling").astype(float)
rates = rates.reindex(index=STEPS, columns=WIDTHS)
table = rates.rename_axis(index=None, columns=None)
table.map("{:.2g}".format, na_action="ignore").fillna("")

# %%
# The chart beside the answer shows the column of 8704.

figure, ax = plt.subplots(figsize=(5, 3))
figure.set_gid("answer")  # the site shows it beside the answer
shown = rates[8704].drop(["packed", "read twice", "roundoff"]).dropna()
figure.set_label(f"Percent of what memory allows: {shown.round().to_dict()}")
ax.bar_label(ax.barh(shown.index, shown), fmt="%.0f %%", padding=3)
ax.invert_yaxis()
ax.set(xlim=(0, 100), xlabel="of what memory allows", title="Backward, 8704 columns")
plt.show()

# %%
# At 8704 columns *roundoff* reaches :bound:`85 % <roundoff>`. Two runs of *prefetch* reach 79 % and
# 84 %, so we cannot call *roundoff* faster. At 4096 columns registers hold a second row: *prefetch*
# reaches :bound:`73 % <tiles>` with ``R=2``, and the table has ``R=1``.
#
# What it costs, and where it ends
# --------------------------------
#
# **Memory.** Each program stores two rows of partial sums in float32. For 132 programs, one for
# each multiprocessor, and 8704 columns these are 9.2 MB.
#
# **Wide rows.** dw and db stay in registers. At 32,768 columns they take 256 KiB, as much as all
# registers of a multiprocessor. So the kernel spills again: a thread of *packed* spills
# :bound:`244 <wide.spilled>` words, and a thread of *pieces* :bound:`450 <wide.pieces.spilled>`.
# For such rows a simpler kernel is better: *read twice* reaches :bound:`34 % <wide.twice>`, and
# PyTorch :bound:`36 % <wide.torch>`. Best is *roundoff*, with :bound:`66 % <wide.roundoff>`: eight
# programs share a row, and exchange their sums through memory.
#
# **The forward** has no sums over rows, so pieces gain less. At 8704 columns the first kernel of
# this page reaches :bound:`68 % <forward>` on the H200. The study's forward in pieces reaches
# :bound:`90 % <forward.pieces>`.
#
# **Code.** In production use :func:`roundoff.kernels.layer_norm`, which chooses pieces, rows and
# warps for each width. It takes any strides, and float16, bfloat16 and float32.
#
# Your own backward
# -----------------
#
# ``mine`` is plain PyTorch. Replace it with a call of yours, such as
# ``return prefetched(x, dy, w, mean, rstd)``. It returns dx, dw and, if you have it, db. The cell
# says how far the results are from float64, and whether eight runs have the same bits. Without a
# GPU, each run starts the programs in a different order.
#
# For RMSNorm set ``NORM`` to ``functional.rms_norm``. Its backward has no mean:
# :math:`dx = r\,(w g - \hat x\, \overline{\hat x\, w g})` with :math:`\hat x = x r`. Copy the
# kernels above, and leave out the mean and db.

ROWS, COLUMNS, NORM = 7, 80, functional.layer_norm


def mine(x, dy, w, mean, rstd):
    xhat, wg = (x - mean[:, None]) * rstd[:, None], w * dy
    c1, c2 = (xhat * wg).mean(1, keepdim=True), wg.mean(1, keepdim=True)
    return rstd[:, None] * (wg - c2 - xhat * c1), (dy * xhat).sum(0)


torch.manual_seed(0)
x, dy = torch.randn(2, ROWS, COLUMNS).to("cpu" if interpreting() else "cuda")
x, w = x - 2.3, torch.rand_like(x[0])
mean = x.mean(1) * (NORM is functional.layer_norm)  # RMSNorm subtracts none
rstd = ((x - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
wide = [t.double().requires_grad_() for t in (x, w, 0 * w)]
out = NORM(wide[0], w.shape, wide[1], eps=1e-5) + wide[2]
truth = torch.autograd.grad(out, wide, dy.double())
results = []
for seed in range(8):
    with shuffled_programs(seed) if interpreting() else nullcontext():
        results.append(mine(x, dy, w, mean, rstd))
for name, right, *runs in zip(("dx", "dw", "db"), truth, *results, strict=False):
    error, bits = scaled_error(right, runs[0]).rms, {digest(run) for run in runs}
    print(f"{name}: typical error {error:.2g}, same bits: {len(bits) == 1}")

# %%
# Limits, and what to read next
# -----------------------------
#
# * Registers and spills come from the Triton that built this page, and rates from Triton 3.6.0.
#   Compile again after an upgrade.
# * Prefetched rows have to fit into shared memory, 227 KiB on Hopper. With ``STAGES=3`` two rows of
#   x and two of dy wait. With 16,384 columns of float32 these take 256 KiB, too much. With
#   ``STAGES=2`` one row of each waits.
# * From 2³¹ elements on, ``row * N`` overflows 32 bits: write ``row.to(tl.int64) * N``.
# * ``R`` of ``add_partial_sums`` is a power of two, and at least the number of programs. With a
#   smaller ``R`` dw and db are silently wrong, as partial sums are left out.
# * Next: :ref:`triton-layer-norm` compares with the kernels of other libraries, and
#   :ref:`reduction-order` says why an order of addition matters.
