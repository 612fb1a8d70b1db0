"""An ONNX graph that a rule can ask and change: constants, shapes, static values, edits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    RemoveUnusedNodesPass,
)

from roundoff.arguments import check_choice, check_number
from roundoff.errors import ArgumentError, ModelError
from roundoff.graph.protos import captured

#: A size: a number, or a symbolic one by name ("s0 + 1"): equal names are equal sizes.
Dim = int | str

#: Domains of the operators that ONNX Runtime adds, and of kernels of ours.
MICROSOFT, OURS = "com.microsoft", "roundoff"
# Values past this many elements are never computed at rewriting time.
_LARGEST = 1 << 26
_RANDOM = {
    *("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"),
    *("Multinomial", "Dropout", "BiasDropout", "BitmaskDropout", "BitmaskBiasDropout"),
}


class Refusal(Exception):  # noqa: N818 - a condition that is not met is no error
    """Raised by a rule that sees its pattern, but not all of its conditions.

    Examples
    --------
    >>> raise Refusal("the weight is no constant")
    Traceback (most recent call last):
    ...
    roundoff.fusion.editor.Refusal: the weight is no constant
    """


def _check_model(proto: Any) -> None:
    """Refuse what is no model, and a graph whose nodes read what nothing before them makes."""
    if not isinstance(proto, onnx.ModelProto):
        raise ArgumentError(
            "cannot rewrite this",
            got=type(proto).__name__,
            expected="an onnx.ModelProto",
            hint="onnx.load(path)" if isinstance(proto, (str, bytes, os.PathLike)) else None,
        )
    if not proto.HasField("graph"):
        raise ModelError("there is no graph in this model", expected="a ModelProto with a graph")
    lacking = captured(proto.graph)
    if lacking:
        raise ModelError(
            "a node or an output reads what nothing before it makes",
            got=", ".join(lacking[:5]),
            expected="inputs, initializers and results of earlier nodes",
            hint="onnx.checker.check_model(model) says where",
        )


class Editor:
    """One ONNX graph under rewriting.

    Parameters
    ----------
    proto : onnx.ModelProto
        Left as it is: the editor works on a copy.
    processor : {"CPU", "CUDA"}
        Where the model is to run; a rule emits only what has a kernel there.
    static : iterable of str
        Inputs that rarely change between runs (weights): what depends on them alone may be
        precomputed.
    ours : bool
        Whether kernels of ours will take what ONNX Runtime has no kernel for.
    packed : float
        Memory that packed weights may take, as a share of the static inputs'; infinite where they
        take the place of those.

    Examples
    --------
    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 10, opset_import: ["" : 20]>'
    ...     "g (float[2] x) => (float[2] y) { z = Neg(x)  y = Neg(z) }"
    ... )
    >>> editor = Editor(model)
    >>> editor.count(), editor.node(editor.graph.outputs[0], "Neg").inputs[0].name
    (2, 'z')
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        processor: str = "CPU",
        static: Iterable[str] = (),
        ours: bool = False,
        packed: float = math.inf,
    ) -> None:
        _check_model(proto)
        check_choice("processor", processor, ("CPU", "CUDA"))
        check_number("packed", packed, 0, finite=False)
        if isinstance(static, str) or not isinstance(static, Iterable):
            raise ArgumentError("static", got=repr(static), expected="names of inputs, in a list")
        # From bytes: ir.from_proto shares tensors with the proto it is given.
        self.model = ir.from_proto(onnx.ModelProto.FromString(proto.SerializeToString()))
        self.graph = self.model.graph
        self.processor = processor
        self.static = set(static)
        self.ours, self.packed = ours, packed
        #: The widest packed weight for which there is room, in elements, once it is known.
        self.widest: int | None = None
        self.opset = self.model.opset_imports.get("", 20)
        unknown = self.static - {v.name for v in self.graph.inputs}
        if unknown:
            raise ArgumentError(
                "static inputs that the model lacks",
                got=sorted(map(str, unknown)),
                expected=f"some of {', '.join(v.name or '' for v in self.graph.inputs)}",
            )
        self._constants: dict[ir.Value, np.ndarray | None] = {}
        self._static: dict[ir.Value, bool] = {}
        self._names = {v.name for v in self.graph.inputs} | set(self.graph.initializers)
        for node in self.graph:
            self._names.update(o.name for o in node.outputs)

    # Questions

    def node(self, value: ir.Value | None, *ops: str) -> ir.Node | None:
        """The node that makes *value*, if it is one of *ops* (any domain of ours or ONNX's)."""
        producer = value.producer() if value is not None else None
        return producer if producer is not None and producer.op_type in ops else None

    def path(self, value: ir.Value | None, *ops: str) -> list[ir.Node]:
        """The nodes before *value*, each by the first input of the one after it, if they are *ops*.

        An empty list where one of them is not.
        """
        nodes: list[ir.Node] = []
        for op in ops:
            node = self.node(value, op)
            if node is None:
                return []
            nodes.append(node)
            value = node.inputs[0]
        return nodes

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The value, where it depends on nothing but initialisers and constants; else None."""
        if value is None:
            return None
        if value not in self._constants:
            self._constants[value] = self._compute(value)
        return self._constants[value]

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one number that a constant holds, whatever its rank."""
        array = self.constant(value) if value is not None and self.size(value) == 1 else None
        return None if array is None else float(array.reshape(()))

    def ints(self, value: ir.Value | None) -> list[int] | None:
        """A constant as a list of integers."""
        array = self.constant(value)
        return None if array is None else [int(i) for i in array.reshape(-1)]

    def shape(self, value: ir.Value | None) -> tuple[Any, ...] | None:
        """The sizes: numbers, and names where symbolic; None where one is unknown."""
        if value is None or value.shape is None:
            return None
        dims = tuple(d if isinstance(d, int) else d.value for d in value.shape)
        return None if None in dims else dims

    def size(self, value: ir.Value) -> int | None:
        """Number of elements, where the shape is static."""
        shape = self.shape(value)
        return math.prod(shape) if shape is not None and static(*shape) else None

    def attribute(self, node: ir.Node, name: str, default: Any = None) -> Any:
        """An attribute's value, or the default."""
        attribute = node.attributes.get(name)
        return default if attribute is None else attribute.value

    def axis(self, node: ir.Node, default: int = -1) -> int:
        """The ``axis`` of a node, counted from the front."""
        axis = int(self.attribute(node, "axis", default))
        shape = node.inputs[0].shape if node.inputs[0] is not None else None
        return axis + len(shape) if axis < 0 and shape is not None else axis

    def is_static(self, value: ir.Value | None) -> bool:
        """Whether *value* depends on nothing but constants and static inputs."""
        if value is None:
            return True
        if value not in self._static:
            node = value.producer()
            if node is None:
                known = value.name in self.static or value.name in self.graph.initializers
                self._static[value] = known
            else:
                self._static[value] = node.op_type not in _RANDOM and all(
                    self.is_static(i) for i in node.inputs
                )
        return self._static[value]

    def uses(self, value: ir.Value) -> int:
        """How many nodes read *value*, one more where the graph returns it."""
        return len(value.uses()) + value.is_graph_output()

    def _compute(self, value: ir.Value) -> np.ndarray | None:
        if value.const_value is not None:
            return value.const_value.numpy()
        node, size = value.producer(), self.size(value)
        if node is None or node.domain not in ("", "ai.onnx") or node.op_type in _RANDOM:
            return None
        if size is None or size > _LARGEST:
            return None
        feeds = {i.name: self.constant(i) for i in node.inputs if i is not None and i.name}
        if any(feed is None for feed in feeds.values()):
            return None
        from onnx.reference import ReferenceEvaluator

        opsets = [onnx.helper.make_opsetid("", self.opset)]
        alone = onnx.helper.make_function(
            "one", "node", list(feeds), [value.name], [ir.to_proto(node)], opsets
        )
        try:
            found = np.asarray(ReferenceEvaluator(alone).run(None, feeds, attributes={})[0])
            # Its Shape, Slice and Unsqueeze have faults that show in the shape.
            return found if found.shape == self.shape(value) else None
        except Exception:  # a node it does not implement stays in the graph
            return None

    # Changes

    def emit(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        before: ir.Node,
        *,
        shapes: Sequence[Sequence[Dim] | None],
        like: ir.Value,
        domain: str = "",
        **attributes: Any,
    ) -> list[ir.Value]:
        """Insert a node; its outputs have *shapes* and the element type of *like*.

        An entry None of *shapes* leaves that optional output out. Returns all outputs.
        """
        outputs = [
            ir.val(self.fresh(op), like.dtype, shape) if shape is not None else ir.val("")
            for shape in shapes
        ]
        self._insert(op, inputs, outputs, before, domain, attributes)
        return outputs

    def replace_by(
        self,
        olds: Sequence[ir.Value | None],
        op: str,
        inputs: Sequence[ir.Value | None],
        before: ir.Node,
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Insert a node whose outputs take the place of *olds*: of their shapes and types.

        An entry None leaves that optional output out.
        """
        outputs = [
            ir.val(self.fresh(op), old.dtype, old.shape) if old is not None else ir.val("")
            for old in olds
        ]
        self._insert(op, inputs, outputs, before, domain, attributes)
        for old, new in zip(olds, outputs, strict=True):
            if old is not None:
                self.replace(old, new)

    def _insert(
        self,
        op: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        before: ir.Node,
        domain: str,
        attributes: dict[str, Any],
    ) -> None:
        node = ir.node(op, inputs, attributes, domain=domain, outputs=outputs)
        self.graph.insert_before(before, node)
        if domain:
            self.model.opset_imports.setdefault(domain, 1)

    def initializer(self, array: np.ndarray, name: str = "const") -> ir.Value:
        """A new constant."""
        value = ir.val(self.fresh(name), const_value=ir.tensor(array))
        self.graph.register_initializer(value)
        return value

    def reshape(self, value: ir.Value, shape: Sequence[Dim], before: ir.Node) -> ir.Value:
        """*value* under another shape (itself, where it has that shape).

        Raises
        ------
        Refusal
            Two sizes or more are symbolic, and do not stay where they are.
        """
        own = self.shape(value)
        if own == tuple(shape):
            return value
        numbers = reshape_target(own or (), shape)
        if numbers is None:
            raise Refusal(f"no Reshape makes {shape} of {own}")
        target = self.initializer(np.array(numbers, dtype=np.int64), "shape")
        return self.emit("Reshape", [value, target], before, shapes=[shape], like=value)[0]

    def sizes(self, value: ir.Value, start: int, end: int, before: ir.Node) -> ir.Value:
        """The sizes of some axes of *value*, an int64 vector."""
        some = (self.shape(value) or ())[start:end]
        if static(*some):
            return self.initializer(np.array(some, dtype=np.int64), "sizes")
        kind = ir.val("", ir.DataType.INT64)
        (made,) = self.emit(
            "Shape", [value], before, shapes=[[len(some)]], like=kind, start=start, end=end
        )
        return made

    def transpose(self, value: ir.Value, perm: Sequence[int], before: ir.Node) -> ir.Value:
        """*value* with its axes in another order."""
        shape = self.shape(value)
        if shape is None:
            raise ModelError("cannot transpose a value of unknown shape", got=value.name)
        shapes = [[shape[p] for p in perm]]
        return self.emit("Transpose", [value], before, shapes=shapes, like=value, perm=perm)[0]

    def replace(self, old: ir.Value, new: ir.Value, *, returned_only: bool = False) -> None:
        """Let every reader of *old*, the graph's outputs included, read *new*.

        With *returned_only* the nodes keep reading *old*, and the graph returns *new*.
        """
        if not returned_only:
            for node, index in list(old.uses()):
                node.replace_input_with(index, new)
        if not old.is_graph_output():
            return
        last = old.producer()
        if last is not None and (new.producer() is None or new.is_graph_output()):
            # An input or another output keeps its name, so a copy carries this one.
            (copy,) = self.emit("Identity", [new], last, shapes=[()], like=new)
            copy.shape, new = new.shape, copy
        name, old.name = old.name, self.fresh(f"{old.name}_was")
        new.name = name
        for i, output in enumerate(self.graph.outputs):
            if output is old:
                self.graph.outputs[i] = new

    def clean(self) -> None:
        """Drop what nothing reads, and restore the order of the nodes."""
        self.graph.sort()
        RemoveUnusedNodesPass()(self.model)

    def merge_equal_nodes(self) -> bool:
        """Compute once what nodes of one operator, inputs and attributes compute; whether any.

        What nothing reads is dropped before: two equal nodes of a rewrite that was given up would
        count, and be there again after the next one. A model that draws random numbers, or may in a
        function of its own, is left as it is.
        """
        if self.model.functions or any(node.op_type in _RANDOM for node in self.graph):
            return False
        self.clean()
        equal = ir.passes.Sequential(
            DeduplicateInitializersPass(1 << 16), CommonSubexpressionEliminationPass()
        )
        return bool(equal(self.model).modified)

    def fresh(self, name: str) -> str:
        """A value's name that the graph does not use yet."""
        return fresh_name(name, self._names)

    def count(self) -> int:
        """Number of nodes."""
        return sum(1 for _ in self.graph)

    def proto(self) -> onnx.ModelProto:
        """The graph as it now is, as a new proto."""
        self.clean()
        return ir.to_proto(self.model)


def both_orders(node: ir.Node) -> list[tuple[ir.Value | None, ...]]:
    """The operands of a node that commutes, either way round."""
    return [tuple(node.inputs), tuple(reversed(node.inputs))]


def static(*sizes: Any) -> bool:
    """Whether all sizes are numbers.

    Examples
    --------
    >>> static(2, 3), static(2, "s0")
    (True, False)
    """
    return all(isinstance(s, int) for s in sizes)


def size_product(a: Dim, b: Dim) -> Dim:
    """A size that is the product of two.

    Examples
    --------
    >>> size_product(2, 3), size_product("s0", 3)
    (6, '(s0)*(3)')
    """
    return a * b if isinstance(a, int) and isinstance(b, int) else f"({a})*({b})"


def reshape_target(before: Sequence[Dim], after: Sequence[Dim]) -> list[int] | None:
    """What Reshape takes for *after*: numbers, 0 for "as it was", one -1; None where they fail.

    Examples
    --------
    >>> reshape_target([2, "s0", 12], [2, "s0", 3, 4])
    [2, 0, 3, 4]
    >>> reshape_target(["s0", 12], [3, "s0", 4]), reshape_target(["s0", "s1"], ["s1", "s0"])
    ([3, -1, 4], None)
    """
    if static(*after):
        return [int(n) for n in after]
    if 0 in after:  # beside it -1 cannot be inferred, and 0 would copy
        return None
    target: list[int] = []
    for i, size in enumerate(after):
        if isinstance(size, int):
            target.append(size)
        else:
            target.append(0 if i < len(before) and before[i] == size else -1)
    return target if target.count(-1) <= 1 else None


def fresh_name(name: str, taken: set[Any]) -> str:
    """A name that is not taken yet; now it is.

    Examples
    --------
    >>> fresh_name("x", {"x", "x_1"})
    'x_2'
    """
    candidate, i = name, 0
    while candidate in taken:
        i += 1
        candidate = f"{name}_{i}"
    taken.add(candidate)
    return candidate
