"""How the rows of a normalisation are divided: over programs, into tiles and pieces."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from ._runtime import ceil_div, interpreting, multiprocessors, power_of_2

#: Programs that can share a row; with more of them rows are read twice, in chunks.
_MOST_SHARES = 32


class Tiling(NamedTuple):
    """How a kernel divides its rows; part of what fixes the bits of a result.

    Attributes
    ----------
    rows : int
        Rows of a tile.
    piece : int
        Columns of a piece, a power of two.
    pieces : int
        Pieces of a program's columns; 0 where the kernel loops over chunks of `piece` columns.
    warps : int
        Warps of a program.
    stages : int
        Depth of the pipeline: with 2 the next tile is loaded while one is computed. Where programs
        share a row: how many rows ahead of its own share a program takes.
    per_sm : int
        Programs for each multiprocessor; 0 where each tile has its own.
    hold : bool
        Whether the weight stays in registers.
    shares : int
        Programs that share a row, each with its own columns, in one cooperative launch.
    again : bool
        Whether a forward converts a packed row once more for its result: half the registers.

    Examples
    --------
    >>> from roundoff.kernels._norm_tilings import backward_tiling
    >>> tiling = backward_tiling(15872, 2)
    >>> tiling.pieces * tiling.piece  # columns that are computed, padding included
    16384
    """

    rows: int
    piece: int
    pieces: int
    warps: int
    stages: int = 1
    per_sm: int = 0
    hold: bool = False
    shares: int = 1
    again: bool = False

    def programs(self, tiles: int, index: int) -> int:
        """Programs for so many tiles on a CUDA device, or groups of them; -1 is the interpreter."""
        most = self.per_sm * multiprocessors(index) // self.shares
        return min(tiles, max(1, most)) if self.per_sm else tiles


def _pieces(columns: int, rows: int, piece: int, *rest: Any) -> Tiling:
    return Tiling(rows, piece, ceil_div(columns, piece), *rest)


#: A row in chunks, by two kernels that each read it.
CHUNKS = Tiling(16, 256, 0, 4, 1, 1)


def _shared(
    columns: int, most: int, piece: int, warps: int, ahead: int, per_sm: int, hold: bool
) -> Tiling:
    """A row over as few programs as have at most so many columns each; beyond 32, in chunks."""
    shares = ceil_div(columns, most)
    if shares > _MOST_SHARES:
        return CHUNKS
    pieces = ceil_div(columns, shares * piece)
    return Tiling(1, piece, pieces, warps, ahead, per_sm, hold, shares)


@cache
def forward_tiling(columns: int, itemsize: int, many: bool = False) -> Tiling:
    """Launch parameters of the forward kernel for rows of `columns` elements of `itemsize` bytes.

    Measured on an H200 in float16 and float32; bfloat16 goes as float16. With `many`
    rows, more than 8192, some widths do better without a pipeline. Pieces and warps, which fix the
    order of the sums, stay the same: the bits of a row do not depend on how many others there are.

    Examples
    --------
    >>> from roundoff.kernels._norm_tilings import forward_tiling
    >>> tiling = forward_tiling(8704, 2)
    >>> tiling.piece, tiling.pieces, tiling.warps
    (2048, 5, 4)
    """
    size = columns * itemsize // 2
    if size > 65536:
        return Tiling(1, 65536 // itemsize, 0, 32)
    if size <= 1024:
        piece = power_of_2(columns)
        return Tiling(max(1, 4096 // itemsize // piece), piece, 1, 1, 1, 0, itemsize == 4)
    if itemsize == 2:
        if size <= 2560:
            return _pieces(columns, 2, 512, 2, 3, 6 if size <= 2048 else 4, True)
        if size <= 3072 or (size <= 4096 and not many):
            return _pieces(columns, 1, 1024, 4, 3, 4, True)
        if size <= 7168:
            if many:
                return _pieces(columns, 1, 1024, 4)
            return _pieces(columns, 1, 1024, 4, *((3, 3) if size <= 6144 else (4, 2)), True)
        if size <= 16384:
            again = 10240 < size <= 12288 or size > 15872
            return _pieces(columns, 1, 2048, 4)._replace(again=again)
        # A row that is converted again takes half the registers: two programs fit, beyond 32,768
        # columns one, which has all threads.
        wide = (4096, 8) if size <= 32768 else (16384, 32)
        return _pieces(columns, 1, *wide)._replace(again=True)
    if size <= 2048:
        return _pieces(columns, 1, 1024, 1, 1, 0, True)
    if size <= 8192:
        return _pieces(columns, 1, 1024, 2 if size <= 4096 else 4, 1, 0, True)
    if size <= 16384:
        return _pieces(columns, 1, 2048, 8, 1, 0, True)
    if size <= 32768:
        return _pieces(columns, 1, 2048, 16 if size <= 24576 else 8)
    return _pieces(columns, 1, 8192, 32, 1, 1)


@cache
def backward_tiling(columns: int, itemsize: int) -> Tiling:
    """Launch parameters of the backward kernel, as :func:`forward_tiling`.

    The sums dweight and dbias fill the registers of a multiprocessor at 32,768 columns: from 16,384
    columns of two bytes on, 12,288 of four, several programs share a row.

    Examples
    --------
    >>> from roundoff.kernels._norm_tilings import backward_tiling
    >>> [backward_tiling(n, 2).shares for n in (8704, 16384, 24576, 65536)]
    [1, 1, 6, 6]
    """
    size = columns * itemsize // 2
    if size > (16384 if itemsize == 2 else 24576):
        if itemsize == 4:
            if columns <= 32768:
                return _shared(columns, 3072, 512, 4, 2, 2, True)
            return _shared(columns, 6144, 1024, 8, 2, 1, True)
        if columns <= 32768:
            return _shared(columns, 4096, 1024, 4, 2, 2, False)
        return _shared(columns, 12288, 2048, 8, 1, 1, False)
    small, large = 2048 // itemsize, 4096 // itemsize
    if size <= 1024:
        piece = power_of_2(columns)
        rows = (4096 if itemsize == 2 else 8192) // itemsize // piece
        return Tiling(max(1, rows), piece, 1, 4, 3, 2 if itemsize == 2 else 1, True)
    if size <= 2048:
        rows, per_sm = (2, 2) if itemsize == 2 else (4, 1)
        return _pieces(columns, rows, small, 4, 3, per_sm, True)
    if size <= 3072:
        return _pieces(columns, 2, small, 4, 4, 1, True)
    if size <= 4096:
        return _pieces(columns, 2, large, 8, 3, 1, True)
    if size <= 4608 and itemsize == 2:  # three large pieces would be a third too much
        return _pieces(columns, 1, small, 8, 3, 2, True)
    if size <= 6144:
        return _pieces(columns, 1, large, 8, 4, 1, True)
    # From here on registers are short: wider types and wider rows read the weight again.
    hold = size <= (12288 if itemsize == 2 else 8192)
    return _pieces(columns, 1, large, 8, 3 if size <= 14336 else 2, 1, hold)


def second_stage_tiling(count: int, columns: int) -> tuple[int, int]:
    """Partial sums and columns of a tile of the second stage."""
    # The interpreter is quicker with few large tiles; the order of the sum stays the same.
    return (
        min(power_of_2(count), 64),
        min(power_of_2(columns), 1024 if interpreting() else 16),
    )
