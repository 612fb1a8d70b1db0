"""From a file, bytes or proto to a checked ``ModelProto``, and from its tensors to values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    TensorProto,
    helper,
    numpy_helper,
)
from onnx.external_data_helper import load_external_data_for_tensor

from roundoff.errors import ModelError
from roundoff.graph.protos import read

from .values import brief, to_value


def load(model: Any, custom: Iterable[tuple[str, str]] = ()) -> tuple[ModelProto, Path | None]:
    """Read *model*, check it, and put the bodies of its local functions where they are called.

    Parameters
    ----------
    model : ModelProto, GraphProto, bytes, str or Path
        A bare graph is taken to use the newest opset that ``onnx`` knows.
    custom : iterable of (domain, name)
        Functions that stay calls.

    Returns
    -------
    (ModelProto, Path or None)
        With the folder where external data may lie; None for a model that was not read from a file.

    Raises
    ------
    ModelError
        When the model can't be read, or ONNX's checker refuses it.
    """
    model, folder = read(model)
    if isinstance(model, GraphProto):
        newest = helper.make_opsetid("", onnx.defs.onnx_opset_version())
        model = helper.make_model(model, opset_imports=[newest])
    if not isinstance(model, ModelProto):
        raise ModelError(
            "not a model",
            got=type(model).__name__,
            expected="ModelProto, GraphProto, bytes or a path",
        )
    try:
        onnx.checker.check_model(_checked(model))
        if model.functions:
            model = onnx.inliner.inline_selected_functions(model, list(custom), exclude=True)
    except Exception as error:
        raise ModelError("ONNX's checker refuses the model", got=brief(error)) from error
    return model, folder


def domain_of(domain: str) -> str:
    """The domain, ``""`` for ONNX's own under its longer name."""
    return "" if domain == "ai.onnx" else domain


def _checked(model: ModelProto) -> ModelProto:
    """What the checker gets: a copy without large constants, as it serialises the model."""
    graph = GraphProto(
        name=model.graph.name,
        node=model.graph.node,
        input=model.graph.input,
        output=model.graph.output,
        sparse_initializer=model.graph.sparse_initializer,
        initializer=[
            TensorProto(name=t.name, data_type=t.data_type, dims=[0])
            if t.data_location == TensorProto.EXTERNAL or t.ByteSize() > 4096
            else t
            for t in model.graph.initializer
        ],
    )
    for info in (*graph.input, *graph.output):
        # The checker asks for a shape; ONNX Runtime and the specification take an unknown rank.
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    return ModelProto(
        ir_version=model.ir_version,
        opset_import=model.opset_import,
        functions=model.functions,
        graph=graph,
    )


def tensor_value(tensor: TensorProto, folder: Path | None, where: str) -> Any:
    """The value of a constant; external data is read only from inside *folder*.

    Raises
    ------
    ModelError
        When the data is missing, malformed, or outside the model's folder.
    """
    if tensor.data_location == TensorProto.EXTERNAL and folder is None:
        raise ModelError(
            f"constant {where!r} lies in a file beside the model",
            got=", ".join(e.value for e in tensor.external_data if e.key == "location"),
            hint="give the path of the model instead of its content",
        )
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            tensor = TensorProto.FromString(tensor.SerializeToString())
            load_external_data_for_tensor(tensor, str(folder))
        array = numpy_helper.to_array(tensor)
    except Exception as error:
        raise ModelError(
            f"the data of constant {where!r} cannot be read", got=brief(error)
        ) from error
    return to_value(array)


def attribute_value(attribute: AttributeProto, folder: Path | None, where: str) -> Any:
    """An attribute as a Python object: bytes become str, tensors values, graphs stay protos."""
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return tensor_value(value, folder, where)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type == AttributeProto.STRINGS:
        return [v.decode("utf-8", "replace") for v in value]
    return value
