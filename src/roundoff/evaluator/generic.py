"""Kernels for any operator: the node alone, in ONNX Runtime or in ONNX's reference evaluator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto, helper

from roundoff.dtypes import DTYPES, dtype_info
from roundoff.errors import (
    ArgumentError,
    ModelError,
    RoundoffError,
)
from roundoff.graph.protos import bodies
from roundoff.precision import torch_tf32

from .checks import schema_of
from .nodes import Node, NotHandledError
from .values import elem_type, on_device, signature, to_numpy, to_value, type_proto
from .verified import check_values, check_verified

# Old enough for every ONNX Runtime that runs these opsets.
_IR_VERSION = 10
_FLOAT_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type", "softmax_precision"}


class OrtKernel:
    """Runs the nodes of an operator in ONNX Runtime, each alone in a session for its types.

    Parameters
    ----------
    op_type : str, optional
        The operator that it stands for, as ONNX names it; None for any. For another one in
        ``custom_kernels`` it is refused.
    domain : str
        The operator's domain.

    Attributes
    ----------
    name : str
        What :meth:`~roundoff.evaluator.TorchOnnxEvaluator.kernels_used` reports: the operator's
        name and ``Ort``, or ``ort``.
    operator : tuple of str or None
        (domain, op_type).

    Examples
    --------
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> from roundoff.models import layer_norm_matmul
    >>> kernels = {("", "MatMul"): OrtKernel("MatMul")}
    >>> evaluator = TorchOnnxEvaluator(layer_norm_matmul(10), custom_kernels=kernels)
    >>> list(evaluator.kernels_used().values())
    ['torch', 'MatMulOrt', 'torch']
    """

    def __init__(self, op_type: str | None = None, domain: str = "") -> None:
        if not isinstance(op_type, str | None) or not isinstance(domain, str):
            raise ArgumentError(
                "an operator", got=f"{op_type!r}, {domain!r}", expected="its name and its domain"
            )
        self.name = "ort" if op_type is None else f"{op_type}Ort"
        self.operator = None if op_type is None else (domain, op_type)

    def bind(self, node: Node) -> Callable[..., Any]:
        """The function that computes *node*; sessions are made when types are known.

        Raises
        ------
        NotHandledError
            ONNX Runtime has no such operator.
        """
        if (node.domain, node.op_type) not in _ort_operators():
            raise NotHandledError(f"ONNX Runtime has no operator {node.operator}")

        def make(model: ModelProto) -> Callable[..., Any]:
            from roundoff.ort import session

            return session(model, node.settings.providers).run

        call = _by_types(node, make)
        if (
            node.settings.device.type == "cuda"
        ):  # a session keeps the precision that it is made with
            call = _by_precision([call, _by_types(node, make)])
        if node.operator not in ("Div", "Mod"):
            return call

        def divided(a: Any, b: Any) -> Any:
            check_divisor(to_numpy(a), to_numpy(b))
            return call(a, b)

        return divided


def _by_precision(calls: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """The first of two functions where torch computes in float32, the second where in TF32."""
    return lambda *inputs: calls[torch_tf32()](*inputs)


@functools.cache
def _ort_operators() -> set[tuple[str, str]]:
    """The operators that ONNX Runtime lists.

    The one private interface of ONNX Runtime that the library uses, as no public one tells which
    operators there are before a session is created. Its own documentation tools read it.
    """
    try:
        import onnxruntime
    except ImportError:  # the other kernels do without
        return set()
    schemas = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    return {(schema.domain, schema.name) for schema in schemas}


def _by_types(
    node: Node, make: Callable[[ModelProto], Callable[..., Any]], shape: bool = False
) -> Callable[..., Any]:
    """A function of the node's inputs; *make* gives it for each combination of types (and shapes).

    *make* gets a model of the node alone, and gives a function of feeds.
    """
    made: dict[Any, Callable[..., Any]] = {}
    # Captures keep their names; no body of the node has such a name as the others get.
    result = next(filter(None, node.outputs), "")
    names = [f"{result}|{place}" for place in range(len(node.inputs))] + list(node.captures)

    def call(*inputs: Any) -> Any:
        types = signature(inputs, shape)
        feeds = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
        if types not in made:
            protos = {name: type_proto(x, shape) for name, x in feeds.items()}
            # A definition may need a newer opset than the version of its operator.
            opset = node.opset if shape or node.subgraphs else node.version
            made[types] = make(_alone(node, names[: len(node.inputs)], protos, opset))
        values, device = iter(to_value(made[types](feeds))), node.settings.device
        outputs = tuple(on_device(next(values), device) if name else None for name in node.outputs)
        return outputs if len(outputs) > 1 else outputs[0]

    return call


def _alone(node: Node, names: list[str], feeds: dict[str, TypeProto], opset: int) -> ModelProto:
    """A model of this node alone, with these names for its inputs."""
    reads = [name if name in feeds else "" for name in names]
    while reads and not reads[-1]:  # a trailing input named "" crashes ONNX Runtime
        reads.pop()
    proto = NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        name=node.name,
        input=reads,
        output=[f"output_{place}" if name else "" for place, name in enumerate(node.outputs)],
        attribute=map(_in_float64, node.proto.attribute) if node.truth else node.proto.attribute,
    )
    graph = helper.make_graph(
        [proto],
        "node",
        [helper.make_value_info(name, type_) for name, type_ in feeds.items()],
        [helper.make_value_info(name, TypeProto()) for name in proto.output if name],
    )
    opsets = {"": 21} | {node.domain: max(1, opset)}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(*pair) for pair in opsets.items()],
        ir_version=_IR_VERSION,
    )


def _in_float64(attribute: AttributeProto) -> AttributeProto:
    info = DTYPES.get(attribute.i)
    if attribute.name not in _FLOAT_ATTRIBUTES or info is None or not info.is_float:
        return attribute
    return helper.make_attribute(attribute.name, onnx.TensorProto.DOUBLE)


def check_divisor(a: Any, b: Any) -> None:
    """Refuse zero, and the one quotient that overflows, of integers: they stop the process.

    Raises
    ------
    ModelError
    """
    info = dtype_info(a.dtype)
    if info.kind not in ("int", "uint"):
        return
    if bool((b == 0).any()):
        raise ModelError("integer division by zero")
    lowest = -(2 ** (info.bits - 1))
    if info.kind == "int" and bool((b == -1).any()) and bool((a == lowest).any()):
        raise ModelError("integer overflow in a division", got=f"{lowest} / -1")


class DefinitionKernel:
    """Runs a node by its definition in ONNX, a function of other operators."""

    name = "torch"

    def bind(self, node: Node) -> Callable[..., Any]:
        """The function that computes *node*.

        Raises
        ------
        NotHandledError
            The operator is none that ONNX defines by others.
        """
        schema = schema_of(node.domain, node.op_type, node.opset)
        if schema is None or not (schema.has_function or schema.has_context_dependent_function):
            raise NotHandledError(f"ONNX does not define {node.operator} by other operators")
        settings = node.settings

        def refuse(feeds: Any) -> Any:
            raise NotHandledError(f"the definition of {node.operator} has no kernel")

        def make(model: ModelProto) -> Callable[..., Any]:
            from .session import TorchOnnxEvaluator

            try:
                body = _inlined(model, schema)
                return TorchOnnxEvaluator(body, settings.providers, truth=settings.truth).run
            except (RoundoffError, NotHandledError):  # known from here on: it is not tried again
                return refuse

        by_definition = _by_types(node, make, shape=True)

        def call(*inputs: Any) -> Any:
            try:
                return by_definition(*inputs)
            except RoundoffError as error:
                raise NotHandledError(f"its definition: {error}") from error

        return call


def _inlined(model: ModelProto, schema: Any) -> ModelProto:
    """A model of one node with the body of the operator's definition in its place."""
    (node,) = model.graph.node
    given = {a.name for a in node.attribute}
    node.attribute.extend(
        a.default_value
        for a in schema.attributes.values()
        if a.default_value.name and a.name not in given
    )
    operators = [(node.domain, node.op_type)]
    body = onnx.inliner.inline_selected_functions(model, operators, inline_schema_functions=True)
    if any((n.domain, n.op_type) in operators or any(bodies(n)) for n in body.graph.node):
        raise NotHandledError("its definition branches")
    for info in body.graph.output:
        info.type.tensor_type.elem_type = 0  # a type that is not known
        info.type.tensor_type.shape.SetInParent()
    return body


class ReferenceKernel:
    """Runs a node in ONNX's reference evaluator (NumPy, one operator at a time).

    Examples
    --------
    >>> from roundoff.evaluator import TorchOnnxEvaluator
    >>> from roundoff.models import layer_norm_matmul
    >>> evaluator = TorchOnnxEvaluator(layer_norm_matmul(), kernels=["reference"])
    >>> set(evaluator.kernels_used().values())
    {'reference'}
    """

    name = "reference"

    def bind(self, node: Node) -> Callable[..., Any]:
        """The function that computes *node*.

        Raises
        ------
        NotHandledError
            ONNX's reference evaluator has no such operator.
        """
        if schema_of(node.domain, node.op_type, node.opset) is None:
            raise NotHandledError(f"ONNX's reference evaluator has no operator {node.operator}")
        if node.operator == "Loop":
            raise NotHandledError("ONNX's reference Loop stacks numbers as vectors")
        if node.truth:
            check_verified(node)

        def make(model: ModelProto) -> Callable[..., Any]:
            from onnx.reference import ReferenceEvaluator

            evaluator = ReferenceEvaluator(model)
            return lambda feeds: evaluator.run(None, {n: to_numpy(x) for n, x in feeds.items()})

        by_reference = _by_types(node, make)

        def call(*inputs: Any) -> Any:
            if node.truth:
                check_values(node, inputs)
            with np.errstate(all="ignore"):
                result = by_reference(*inputs)
            outputs = result if isinstance(result, tuple) else (result,)
            for name, value in zip(node.outputs, outputs, strict=True):
                _check_type(node, name, elem_type(value))
            return result

        return call


def _check_type(node: Node, name: str, got: int) -> None:
    """Refuse a result of the reference evaluator of another type than its definition gives."""
    wanted = node.types[name].tensor_type.elem_type if name in node.types else 0
    if node.truth and got and DTYPES[got].is_float:
        wanted = onnx.TensorProto.DOUBLE
    if wanted and got and got != wanted:
        raise NotHandledError(
            f"ONNX's reference {node.operator} gave {DTYPES[got].name} for {DTYPES[wanted].name}"
        )
