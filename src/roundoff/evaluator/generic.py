"""Kernels for any operator: the node alone, in ONNX Runtime or in ONNX's reference evaluator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import torch
from onnx import AttributeProto, ModelProto, NodeProto, TypeProto, helper

from roundoff.dtypes import DTYPES, dtype_info
from roundoff.errors import (
    ArgumentError,
    ModelError,
    RoundoffError,
)
from roundoff.graph.protos import bodies

from .checks import schema_of
from .nodes import Node
from .values import elem_type, signature, to_numpy, to_value, type_proto
from .verified import refusal, refusal_of_values

# Old enough for every ONNX Runtime that runs these opsets.
_IR_VERSION = 10
_FLOAT_ATTRIBUTES = {"to", "dtype", "output_dtype", "stash_type", "softmax_precision"}


class NotHandledError(Exception):
    """A kernel leaves this node, or these inputs, to the next one.

    The evaluator then tries the next kernel of its order; a custom kernel has none after it.

    Examples
    --------
    >>> from roundoff.evaluator import Node, ReferenceKernel
    >>> node = Node(0, "twice", "nowhere", "Twice", 1, 1, ("X",), ("Z",))
    >>> try:
    ...     ReferenceKernel().bind(node)
    ... except NotHandledError as error:
    ...     print(error)
    ONNX's reference evaluator has no operator nowhere.Twice
    """


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
        known = _ort_operators()
        if known is not None and (node.domain, node.op_type) not in known:
            raise NotHandledError(f"ONNX Runtime has no operator {node.operator}")
        sessions: dict[Any, Any] = {}

        def call(*inputs: Any) -> Any:
            if node.operator in ("Div", "Mod"):
                check_divisor(*map(to_numpy, inputs))
            types = signature(inputs)
            if types not in sessions:
                sessions[types] = _session(node, inputs)
            session = sessions[types]
            outputs = session.run(_feeds(node, inputs))
            return _as_outputs(node, [to_value(x) for x in outputs])

        return call


@functools.cache
def _ort_operators() -> set[tuple[str, str]] | None:
    """The operators that ONNX Runtime lists; None where it lists none.

    The one private interface of ONNX Runtime that the library uses, as no public one tells which
    operators there are before a session is created. Without it a session says what it lacks.
    """
    try:
        import onnxruntime
    except ImportError:  # the other kernels do without
        return set()
    try:  # ONNX Runtime's own documentation tools read it; it is not promised to stay
        schemas = onnxruntime.capi.onnxruntime_pybind11_state.get_all_operator_schema()
    except AttributeError:
        return None
    return {(schema.domain, schema.name) for schema in schemas}


def _session(node: Node, inputs: tuple[Any, ...]) -> Any:
    from roundoff.ort import session

    model = single_node_model(node, inputs)
    return session(model, node.settings.providers)


def _feed_names(node: Node) -> list[str]:
    """An input name for each position, captures included; ``""`` for an absent input.

    No body of the node has such a name.
    """
    result = next(filter(None, node.outputs), "")
    names = [f"{result}|{k}" if n else "" for k, n in enumerate(node.inputs)]
    return [*names, *node.captures]


def _feeds(node: Node, inputs: tuple[Any, ...]) -> dict[str, Any]:
    named = zip(_feed_names(node), inputs, strict=True)
    return {name: x for name, x in named if name and x is not None}


def single_node_model(
    node: Node, inputs: tuple[Any, ...], opset: int | None = None, shape: bool = False
) -> ModelProto:
    """A model of this node alone, for inputs of these types and, unless *shape*, any shape."""
    names = _feed_names(node)
    absent = [n if x is not None else "" for n, x in zip(names, inputs, strict=True)]
    attributes = list(node.proto.attribute)
    names_in = absent[: len(node.inputs)]
    while names_in and not names_in[-1]:  # a trailing input named "" crashes ONNX Runtime
        names_in.pop()
    proto = NodeProto(
        op_type=node.op_type,
        domain=node.domain,
        name=node.name,
        input=names_in,
        output=[f"output_{k}" if n else "" for k, n in enumerate(node.outputs)],
        attribute=[_in_float64(a) for a in attributes] if node.truth else attributes,
    )
    feeds = [
        helper.make_value_info(n, type_proto(x, shape))
        for n, x in zip(absent, inputs, strict=True)
        if n
    ]
    outputs = [helper.make_value_info(n, TypeProto()) for n in proto.output if n]
    graph = helper.make_graph([proto], "node", feeds, outputs)
    known = schema_of(node.domain, node.op_type, node.opset) is not None
    version = opset or (node.version if known and not node.subgraphs else node.opset)
    opsets = {"": 21} | {node.domain: max(version, 1)}
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()],
        ir_version=_IR_VERSION,
    )


def _in_float64(attribute: AttributeProto) -> AttributeProto:
    info = DTYPES.get(attribute.i)
    if attribute.name not in _FLOAT_ATTRIBUTES or info is None or not info.is_float:
        return attribute
    return helper.make_attribute(attribute.name, onnx.TensorProto.DOUBLE)


def _as_outputs(node: Node, results: list[Any]) -> Any:
    """One result per output of the node, None for those not asked for."""
    if len(node.outputs) == 1:
        return results[0]
    remaining = iter(results)
    return tuple(next(remaining) if name else None for name in node.outputs)


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
        evaluators: dict[Any, Any] = {}

        def call(*inputs: Any) -> Any:
            from .session import TorchOnnxEvaluator

            types, settings = signature(inputs, shape=True), node.settings
            try:
                if types not in evaluators:
                    evaluators[types] = TorchOnnxEvaluator(
                        _inlined(node, inputs), settings.providers, truth=settings.truth
                    )
                return _as_outputs(node, evaluators[types].run(None, _feeds(node, inputs)))
            except RoundoffError as error:  # an operator of the body has no kernel, or fails
                raise NotHandledError(f"its definition: {error}") from error

        return call


def _inlined(node: Node, inputs: tuple[Any, ...]) -> ModelProto:
    """The body of an operator's definition, for inputs of these types."""
    model = single_node_model(node, inputs, node.opset, shape=True)
    schema = schema_of(node.domain, node.op_type, node.opset)
    given = {a.name for a in node.proto.attribute}
    model.graph.node[0].attribute.extend(
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
        why = refusal(node) if node.truth else ""
        if why:
            raise NotHandledError(f"ONNX's reference {node.operator} is no truth: {why}")
        evaluators: dict[Any, Any] = {}

        def call(*inputs: Any) -> Any:
            why = refusal_of_values(node, inputs) if node.truth else ""
            if why:
                raise NotHandledError(f"ONNX's reference {node.operator} is no truth: {why}")
            types = signature(inputs)
            if types not in evaluators:
                evaluators[types] = _reference(node, inputs)
            evaluator = evaluators[types]
            feeds = {n: to_numpy(x) for n, x in _feeds(node, inputs).items()}
            with np.errstate(all="ignore"):
                results = evaluator.run(None, feeds)
            names = [name for name in node.outputs if name]
            return _as_outputs(
                node, [_typed(node, n, x) for n, x in zip(names, results, strict=True)]
            )

        return call


def _reference(node: Node, inputs: tuple[Any, ...]) -> Any:
    from onnx.reference import ReferenceEvaluator

    model = single_node_model(node, inputs, node.opset)
    try:
        return ReferenceEvaluator(model)
    except Exception as error:
        raise NotHandledError(f"ONNX's reference evaluator: {error}") from error


def _typed(node: Node, name: str, result: Any) -> Any:
    """A result of the reference evaluator as a value of the type that ONNX's definition gives."""
    value = to_value(result)
    wanted = node.types[name].tensor_type.elem_type if name in node.types else 0
    if node.truth and isinstance(value, torch.Tensor) and value.is_floating_point():
        wanted = onnx.TensorProto.DOUBLE
    got = elem_type(value)
    if wanted and got and got != wanted:
        raise NotHandledError(
            f"ONNX's reference {node.operator} gave {DTYPES[got].name} for {DTYPES[wanted].name}"
        )
    return value
