"""Products of Triton's interpreter that have an order of addition."""

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from roundoff.kernels import interpreting


def _float32(handle):
    if handle.dtype == tl.bfloat16:  # its bits, in an integer
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


@pytest.fixture
def chains(monkeypatch):
    """Products in the interpreter as chains over K, ascending, in float32.

    The interpreter has NumPy multiply, whose order depends on the shape. A GPU's instruction adds
    along K; with this the bits of the interpreter's results are defined, too.
    """

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        left, right, acc = _float32(a), _float32(b), d.data.astype(np.float32)
        with np.errstate(all="ignore"):
            for k in range(left.shape[1]):
                acc = acc + left[:, k : k + 1] * right[k : k + 1]
        return TensorHandle(acc, d.dtype.scalar)

    if interpreting():
        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
