"""Small models for the rules: written as ONNX text, run before and after fusion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.shape_inference
import torch

from roundoff.backend.program import Program
from roundoff.fusion import OptimizationOptions, fuse
from roundoff.fusion.experimental import KERNELS
from roundoff.fusion.rule import Report

OPSETS = '["" : 20, "com.microsoft" : 1]'


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    """A model from ONNX's text form; *constants* become initialisers."""
    made = onnx.parser.parse_model(f"<ir_version: 10, opset_import: {OPSETS}>\n{text}")
    for name, array in constants.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return onnx.shape_inference.infer_shapes(made, strict_mode=True, data_prop=True)


def feeds(proto: onnx.ModelProto, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal numbers for floats, zeros and ones for bool and integers."""
    generator = np.random.default_rng(seed)
    made = {}
    for value in proto.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        floating = np.issubdtype(dtype, np.floating) or "float" in dtype.name
        array = generator.standard_normal(shape) if floating else generator.integers(0, 2, shape)
        made[value.name] = torch.from_numpy(np.asarray(array, np.float32 if floating else dtype))
        if floating:
            made[value.name] = made[value.name].to(getattr(torch, dtype.name))
    return made


def _from_the_cpu(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of ours for tensors of the CPU: a compiled one gets and returns copies."""

    def run(inputs: Sequence[Any], attributes: dict[str, Any]) -> Sequence[Any]:
        from roundoff.kernels import interpreting

        device = "cpu" if interpreting() else "cuda"
        made = kernel([x if x is None else x.to(device) for x in inputs], attributes)
        return [x.cpu() for x in made]

    return run


FROM_THE_CPU = {n: _from_the_cpu(k) for n, k in KERNELS.items()}


def run(proto: onnx.ModelProto, given: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """On the CPU; kernels of ours in Triton's interpreter, or on a GPU where there is one."""
    cpu = torch.device("cpu")
    program = Program(proto, cpu, FROM_THE_CPU)
    return program.run([given[n].contiguous() for n in program.inputs])


def rewritten(
    proto: onnx.ModelProto,
    patterns: str = "default+onnxruntime",
    tolerance: float = 1e-5,
    static: Any = (),
    **options: Any,
) -> tuple[list[str], Report]:
    """Fuse, check the numbers on random inputs, and give the operators that are left."""
    chosen = OptimizationOptions(patterns, interpret=True, **options)
    given_text = proto.SerializeToString(deterministic=True)
    made, report = fuse(proto, chosen, static=static)
    assert proto.SerializeToString(deterministic=True) == given_text
    if not any(n.op_type == "SimplifiedLayerNormalization" for n in made.graph.node):
        onnx.checker.check_model(made)  # that one is ONNX Runtime's, in ONNX's domain
    assert [o.name for o in made.graph.output] == [o.name for o in proto.graph.output]
    given = feeds(proto)
    for before, after in zip(run(proto, given), run(made, given), strict=True):
        assert before.dtype == after.dtype
        torch.testing.assert_close(
            after.double(), before.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    return [n.op_type for n in made.graph.node], report
