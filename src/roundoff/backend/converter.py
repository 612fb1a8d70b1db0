"""An ONNX graph while it is written: values by torch's nodes, constants, sizes.

Sizes are expressions of symbols, as torch keeps them: a value carries them as its dimensions, and
nodes compute them only where an operator asks for a number.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import torch

from roundoff.dtypes import dtype_info
from roundoff.errors import UnsupportedError
from roundoff.evaluator.values import to_numpy
from roundoff.fusion.editor import Dim, fresh_name, reshape_target, static

from .capture import outside
from .sizes import dim, dims, known, symbols_of
from .steps import Kernel
from .views import Take, numbers, take


class LeftToTorchError(Exception):
    """Why an operator of the table stays with torch for these arguments."""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """Where the value of a symbol comes from: a size of an argument, or an integer.

    A size, or a stride, is that of an *axis*. Another number of the argument is itself the integer,
    or the offset of a tensor in its memory.
    """

    name: str
    argument: int
    axis: int | None
    of: Literal["size", "stride", "offset"] = "size"

    def read(self, args: Sequence[Any]) -> int:
        """Its value in these arguments of a call."""
        given = args[self.argument]
        if self.of == "offset":
            return int(given.storage_offset())
        if self.axis is None:
            return int(given)
        return int(given.stride(self.axis) if self.of == "stride" else given.shape[self.axis])


@dataclasses.dataclass
class Converted:
    """An ONNX graph and what it takes to run it.

    Attributes
    ----------
    model : onnx.ModelProto
    names : list of str
        Its inputs, all of them tensors.
    symbols : list of Symbol
        All symbolic sizes that the arguments decide.
    integers : dict of str to str
        Inputs of the model after its tensors, int64 of one element -> the size that each is: a
        symbol, or an expression that a call evaluates.
    strided : list of (str, int, callable)
        Inputs of the model after those: views of an argument, by its place, that reach beyond its
        own elements, and what takes them.
    kernels : dict
        Operator of domain "roundoff" -> what runs it: the operators that stay with torch.
    by_torch : dict of str to str
        Operator that stays with torch -> why.
    numbers : list
        Symbolic integers that those views take.
    written : dict of str to str
        Outputs that are new values of an input, which come last -> that input.
    counted : dict of str to int
        Inputs of one number -> what a call adds to it.
    """

    model: onnx.ModelProto
    names: list[str]
    symbols: list[Symbol]
    integers: dict[str, str]
    strided: list[tuple[str, int, Take]]
    kernels: dict[str, Kernel]
    by_torch: dict[str, str]
    numbers: list[Any]
    written: dict[str, str]
    counted: dict[str, int]


class Converter:
    """A graph under construction: what an operator's function is handed first."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        examples: Sequence[Any],
        names: Sequence[str],
        opset: int,
    ) -> None:
        self.opset = opset
        self.values: dict[torch.fx.Node, Any] = {}
        self.kernels: dict[str, Kernel] = {}
        self.by_torch: dict[str, str] = {}
        self.current = ""
        self.on_cpu = all(e.device.type == "cpu" for e in examples if isinstance(e, torch.Tensor))
        #: Placeholders that are written to -> the new value.
        self.written: dict[torch.fx.Node, ir.Value] = {}
        #: Inputs of one number, which are raised: lengths of caches, one a layer.
        self.counted: dict[str, int] = {}
        #: Results of torch's that may lie in the memory of what they were computed of.
        self.views: set[ir.Value] = set()
        #: Symbolic integers that views of inputs take.
        self.numbers: list[Any] = []
        #: Conditions, and with what a call raises where one is false.
        self.checks: list[tuple[ir.Value, str]] = []
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._constants: dict[Any, ir.Value] = {}
        self._sizes: dict[Any, ir.Value] = {}
        self._symbols: list[Symbol] = []
        self._integers: dict[str, str] = {}
        self._strided: list[tuple[str, int, Take]] = []
        self._views_of_inputs: list[ir.Value] = []
        self._places = {p: i for i, p in enumerate(gm.graph.find_nodes(op="placeholder"))}
        self._names = set(names)
        self._domains = {"": opset}
        places = gm.graph.find_nodes(op="placeholder")
        for i, (node, example, name) in enumerate(zip(places, examples, names, strict=True)):
            if reads(node):
                value = ir.val(name, onnx_type(example.dtype), dims(example.shape))
                self.values[node] = value
                self._inputs.append(value)
                self._bind_axes(value, i)
        for i, example in enumerate(examples):
            size = dim(example) if isinstance(example, torch.SymInt) else 0
            if isinstance(size, str) and size.isidentifier() and size not in self._sizes:
                self._names.add(size)
                self._integer(size, size)
                self._symbols.append(Symbol(size, i, None))

    def _bind_axes(self, value: ir.Value, argument: int | None) -> None:
        """Sizes that *value* has along an axis are known from now on."""
        for axis, size in enumerate(value.shape or ()):
            name = size.value if isinstance(size, ir.SymbolicDim) else None
            if name is not None and name.isidentifier() and name not in self._sizes:
                self._sizes[name] = (value, axis)
                if argument is not None:
                    self._symbols.append(Symbol(name, argument, axis))

    def _integer(self, name: str, size: str) -> ir.Value:
        """A new input of the model: a size, which a call computes."""
        self._sizes[size] = ir.val(name, ir.DataType.INT64, [1])
        self._inputs.append(self._sizes[size])
        self._integers[name] = size
        return self._sizes[size]

    def finish(self, gm: torch.fx.GraphModule, names: Sequence[str]) -> Converted:
        (returned,) = gm.graph.output_node().args
        outputs: list[ir.Value] = []
        values = [self.values[node] for node in returned]  # type: ignore[union-attr, index]
        values += self.written.values()
        if self.checks and values:
            values[0] = self._checked(values[0])
        targets = [self.values[node].name for node in self.written]
        written = {f"written_{i}": name for i, name in enumerate(targets)}
        names = [*names, *written]
        for value, name in zip(values, names, strict=True):
            if value.producer() is None or value in outputs or value in self.views:
                value = self.copy(value)
            outputs.append(value)
            value.name = name
        graph = ir.Graph(
            [*self._inputs, *self._views_of_inputs],
            outputs,
            nodes=self._nodes,
            initializers=list(self._constants.values()),
            opset_imports=self._domains,
            name="graph",
        )
        model = ir.to_proto(ir.Model(graph, ir_version=10))
        return Converted(
            model,
            [*(value.name for value in self._inputs), *(name for name, _, _ in self._strided)],
            self._symbols,
            self._integers,
            self._strided,
            self.kernels,
            self.by_torch,
            self.numbers,
            written,
            self.counted,
        )

    def _checked(self, value: ir.Value) -> ir.Value:
        """A value that is handed on once all conditions are found true."""
        conditions, messages = zip(*self.checks, strict=True)

        def run(given: Sequence[Any], _: dict[str, Any]) -> list[torch.Tensor]:
            for condition, message in zip(given[1:], messages, strict=True):
                torch._assert_async(condition, message)
            return [given[0]]

        self.kernels["torch.checks"] = run
        return self.op("torch.checks", value, *conditions, domain="roundoff")

    # Nodes

    def begin(self, node: torch.fx.Node) -> bool:
        """Whether there is anything to write for a node of torch's graph; it is the current one."""
        if node.op == "get_attr":
            attribute = operator.attrgetter(str(node.target))(node.graph.owning_module)
            if isinstance(attribute, torch.Tensor):
                with outside():
                    self.values[node] = self.constant(to_numpy(attribute))
            return False
        self.current = node.name
        return node.op == "call_function" and not _is_size(node.meta.get("val"))

    def state(self) -> Any:
        """What has been written so far, for :meth:`forget`."""
        return len(self._nodes), dict(self._sizes)

    def forget(self, state: Any) -> None:
        """Drop the nodes that were written since, and the sizes that they compute."""
        count, sizes = state
        kept = {name: self._sizes[size] for name, size in self._integers.items()}
        self._sizes = sizes | {self._integers[name]: value for name, value in kept.items()}
        for node in self._nodes[count:]:
            for i in range(len(node.inputs)):
                node.replace_input_with(i, None)
        del self._nodes[count:]

    def end(self, node: torch.fx.Node, result: Any) -> None:
        """What was written for a node is its value from now on."""
        self.values[node] = result
        expected: Any = node.meta.get("val")
        if isinstance(result, list):
            for i, value in enumerate(result):
                self._finish(value, expected[i], f"{node.name}_{i}")
        else:
            self._finish(result, expected, node.name)

    def _finish(self, value: ir.Value | None, expected: Any, name: str) -> None:
        """Give a value the type and the sizes that torch foretold."""
        # What passes through (a clone, an alias) keeps the name that it has.
        if value is not None and str(value.name).startswith("%"):
            value.shape = ir.Shape(dims(expected.shape))
            value.type = ir.TensorType(onnx_type(expected.dtype))
            value.name = self._fresh(name)
            self._bind_axes(value, None)

    def view_of_input(self, nodes: Sequence[torch.fx.Node]) -> ir.Value | None:
        """The last of a chain of views as an input of the model, if the first is an argument."""
        if nodes[0] not in self._places:
            return None
        value = self.value_like(nodes[-1].meta["val"])
        name = value.name = self._fresh(f"view_{nodes[-1].name}")
        self._views_of_inputs.append(value)
        self._strided.append((name, self._places[nodes[0]], take(nodes[1:])))
        self.numbers += numbers(nodes[1:])
        return value

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[Any] | None = None,
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """A node of one output; shape and type are the first input's where not given."""
        first = inputs[0]
        assert first is not None
        # The name of torch's node comes later, if it is this node's result.
        name = self._fresh(f"%{self.current}")
        out = ir.val(name, dtype or first.dtype, dims_of(first) if shape is None else shape)
        self.add(op_type, inputs, [out], domain, **attributes)
        return out

    def copy(self, value: ir.Value) -> ir.Value:
        """*value* in memory of its own."""
        self.kernels["own.memory"] = lambda given, _: [given[0].clone()]
        if value in self.views or _is_complex(value):
            return self.op("own.memory", value, domain="roundoff")
        return self.op("Identity", value)

    def add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[ir.Value],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """A node with outputs that exist already.

        Raises
        ------
        LeftToTorchError
            An attribute is no number yet, or a value has a type that ONNX Runtime does not take.
        """
        symbolic = [k for k, v in attributes.items() if is_symbolic(v)]
        if symbolic:
            raise LeftToTorchError(f"{op_type} has no symbolic {symbolic[0]}")
        if not domain and any(v is not None and _is_complex(v) for v in (*inputs, *outputs)):
            raise LeftToTorchError("complex numbers have no kernels in ONNX Runtime")
        # One left out at the end is not named: onnxruntime 1.31's fusion of a residual with a
        # LayerNormalization reads an empty name as a bias, and ends the process.
        inputs = list(inputs)
        while inputs and inputs[-1] is None:
            inputs.pop()
        self._domains.setdefault(domain, 1)
        node = ir.node(
            op_type,
            inputs,
            {k: v for k, v in attributes.items() if v is not None},
            domain=domain,
            outputs=outputs,
            name=self._fresh(f"{self.current or 'node'}/{op_type}"),
            metadata_props={"roundoff.fx": self.current},
        )
        self._nodes.append(node)

    def value_like(self, example: torch.Tensor) -> ir.Value:
        """A value to be computed, of the type and sizes of a fake tensor."""
        name = self._fresh(f"%{self.current}")
        return ir.val(name, onnx_type(example.dtype), dims(example.shape))

    def _fresh(self, name: str) -> str:
        return fresh_name(name, self._names)

    # Arguments

    def tensor(self, x: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """An argument as a value: a node's, or a number as a constant of type *dtype*."""
        if isinstance(x, torch.fx.Node):
            example = x.meta.get("val")
            if isinstance(example, (float, torch.SymFloat)):
                return self.tensor(float(example), dtype)
            known = _is_size(example)
            value = self.reshape(self.size(dim(example)), []) if known else self.values[x]
            return value if dtype is None else self.cast(value, dtype)
        kind = dtype or (ir.DataType.INT64 if isinstance(x, int) else ir.DataType.FLOAT)
        return self.constant(np.array(x).astype(kind.numpy()))

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """*value* as another type; a constant is cast at once."""
        if value.dtype == dtype:
            return value
        array = self.array(value)
        if array is not None and array.size <= 64:
            return self.constant(array.astype(dtype.numpy()))
        return self.op("Cast", value, dtype=dtype, to=int(dtype))

    def constant(self, array: Any) -> ir.Value:
        """A small constant, each stored once."""
        array = np.asarray(array)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._fresh("const")
            value = ir.val(name, const_value=ir.tensor(array, name=name))
            self._constants[key] = value
        return self._constants[key]

    def array(self, value: ir.Value) -> np.ndarray | None:
        """What a small constant holds."""
        return None if value.const_value is None else value.const_value.numpy()

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        """Integers as a constant of one axis."""
        if is_symbolic(numbers):
            raise LeftToTorchError("a constant has no symbolic element")
        return self.constant(np.array(numbers, np.int64))

    # Sizes

    def size(self, expression: Dim) -> ir.Value:
        """A size as an int64 of shape (1,)."""
        if isinstance(expression, int):
            return self.ints([expression])
        known = self._sizes.get(expression)
        if isinstance(known, tuple):
            value, axis = known
            if _is_complex(value):  # of which ONNX Runtime tells no shape
                return self._evaluated(expression)
            known = self.op(
                "Shape", value, shape=[1], dtype=ir.DataType.INT64, start=axis, end=axis + 1
            )
            self._sizes[expression] = known
        if known is None:
            known = self._sizes[expression] = self._computed(symbols_of(expression), expression)
        return known

    def _computed(self, e: Any, text: str) -> ir.Value:
        """An expression of sizes: by nodes, or as an integer that a call evaluates."""
        if _has_nodes(e):
            return self._built(e)
        return self._evaluated(text)

    def _evaluated(self, text: str) -> ir.Value:
        """A size as an integer that each call evaluates."""
        if not known(text, {s.name for s in self._symbols}):
            raise UnsupportedError("a size that no input has", got=text)
        return self._integer(self._fresh("size"), text)

    def _built(self, e: Any) -> ir.Value:
        if e.is_Integer:
            return self.ints([int(e)])
        if e.is_Symbol:
            if str(e) not in self._sizes:
                raise UnsupportedError("a size that no input has", got=str(e))
            return self.size(str(e))
        first, *rest = map(self._built, e.args)
        for other in rest:
            first = self.op(_NODES[type(e).__name__], first, other)
        return first

    def shape(self, sizes: Sequence[Dim]) -> ir.Value:
        """Sizes as an int64 of one axis."""
        if static(*sizes):
            return self.ints(sizes)  # type: ignore[arg-type]
        parts = [self.size(s) for s in sizes]
        if len(parts) == 1:
            return parts[0]
        return self.op("Concat", *parts, shape=[len(sizes)], dtype=ir.DataType.INT64, axis=0)

    def reshape(self, value: ir.Value, sizes: Sequence[Dim]) -> ir.Value:
        """*value* under another shape."""
        before = dims_of(value)
        if before == list(sizes):
            return value
        target = reshape_target(before, sizes)
        at = self.ints(target) if target is not None else self.shape(sizes)
        # A size of zero is meant as one: Reshape reads 0 as "the size it was" otherwise.
        zero = 1 if 0 in sizes else None
        return self.op("Reshape", value, at, shape=sizes, allowzero=zero)


def reads(place: torch.fx.Node) -> bool:
    """Whether a placeholder is a tensor that the model takes: not a number that is a constant."""
    value = place.meta["val"]
    return isinstance(value, torch.Tensor) and bool(place.users or value.dim())


def dims_of(value: ir.Value) -> list[Dim]:
    """A value's sizes: numbers and expressions."""
    assert value.shape is not None
    return [d if isinstance(d, int) else str(d.value) for d in value.shape]


def is_symbolic(argument: Any) -> bool:
    """Whether an argument is a size, or contains one, that is no number yet.

    Examples
    --------
    >>> is_symbolic([1, 2]), is_symbolic(None)
    (False, False)
    """
    if isinstance(argument, (list, tuple)):
        return any(map(is_symbolic, argument))
    return isinstance(argument, (torch.fx.Node, torch.SymInt, torch.SymFloat, torch.SymBool))


#: Function in an expression of sizes -> operator of ONNX.
_NODES = {
    "Add": "Add",
    "Mul": "Mul",
    "FloorDiv": "Div",
    "CleanDiv": "Div",
    "Mod": "Mod",
    "PythonMod": "Mod",
    "Max": "Max",
    "Min": "Min",
}


def _has_nodes(e: Any) -> bool:
    """Whether ONNX computes an expression of sizes as torch does."""
    if e.is_Integer or e.is_Symbol:
        return True
    op = _NODES.get(type(e).__name__)
    # Div rounds to zero, torch down.
    rounds = op in ("Div", "Mod") and not all(a.is_nonnegative for a in e.args)
    return op is not None and not rounds and all(map(_has_nodes, e.args))


def _is_complex(value: ir.Value) -> bool:
    return value.dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


def onnx_type(dtype: torch.dtype) -> ir.DataType:
    """torch's type of an element as ONNX's."""
    return ir.DataType(dtype_info(dtype).onnx)


def _is_size(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool))
