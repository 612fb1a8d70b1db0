"""Mutated models: each is run here, and judged against ONNX's reference and ONNX Runtime.

Run as a program it does so for one seed and count and prints a JSON line per case, so that a
process that dies names the case it died of.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import AttributeProto, ModelProto, TensorProto
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from roundoff.errors import RoundoffError
from roundoff.evaluator import TorchOnnxEvaluator
from roundoff.evaluator.values import to_numpy

EXTREMES = [-(2**63), -(2**31), -100, -2, -1, 0, 1, 2, 3, 7, 100, 2**31 - 1, 2**31, 2**62]
# Their results are drawn at random, or take the models far beyond a test's time.
LEFT_OUT = ("bernoulli", "dropout", "image_decoder", "random")


def sources() -> list[Any]:
    """Small cases of ONNX's suite, by name."""
    cases = load_model_tests(kind="node")
    small = [
        c for c in cases
        if c.model.ByteSize() < 20_000 and not any(w in c.name for w in LEFT_OUT)
    ]  # fmt: skip
    return sorted(small, key=lambda c: c.name)


def mutate(model: ModelProto, rng: random.Random) -> tuple[ModelProto, str]:
    """A changed copy of a model, and what was changed."""
    copy = ModelProto()
    copy.CopyFrom(model)
    kinds = [flip_byte, attribute, attribute, drop_attribute, operator, drop_input, swap_inputs,
             rewire, input_type, input_type, input_shape, constant, cycle, drop_node, opset,
             output_name, extra_input]  # fmt: skip
    for _ in range(20):
        kind = rng.choice(kinds)
        changed = kind(copy, rng)
        if changed is not None:
            return (changed if isinstance(changed, ModelProto) else copy), kind.__name__
    return copy, "nothing"


def node_of(model: ModelProto, rng: random.Random) -> Any:
    nodes = list(model.graph.node)
    for node in model.graph.node:
        for attr in node.attribute:
            nodes += list(attr.g.node)
    return rng.choice(nodes)


def flip_byte(model: ModelProto, rng: random.Random) -> Any:
    content = bytearray(model.SerializeToString())
    for _ in range(50):
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        try:
            return ModelProto.FromString(bytes(content))
        except Exception:
            content = bytearray(model.SerializeToString())
    return None


def attribute(model: ModelProto, rng: random.Random) -> Any:
    node = node_of(model, rng)
    if not node.attribute:
        return None
    attr = rng.choice(list(node.attribute))
    if attr.type == AttributeProto.INT:
        attr.i = rng.choice([*EXTREMES, attr.i + 1])
    elif attr.type == AttributeProto.INTS and attr.ints:
        if rng.random() < 0.3:
            attr.ints.append(rng.choice(EXTREMES))
        elif rng.random() < 0.2:
            del attr.ints[-1]
        else:
            attr.ints[rng.randrange(len(attr.ints))] = rng.choice(EXTREMES)
    elif attr.type == AttributeProto.FLOAT:
        attr.f = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
    elif attr.type == AttributeProto.STRING:
        attr.s = rng.choice([b"", b"nonsense", b"\xff\xfe", attr.s[:-1]])
    elif attr.type == AttributeProto.TENSOR:
        return tensor(attr.t, rng)
    else:
        return None
    return True


def tensor(t: TensorProto, rng: random.Random) -> Any:
    choice = rng.randrange(3)
    if choice == 0 and t.dims:
        t.dims[rng.randrange(len(t.dims))] = rng.choice([0, 1, 2, 3, -1, 1000])
    elif choice == 1:
        t.data_type = rng.choice(range(27))
    else:
        for field in (t.int64_data, t.int32_data):
            if field:
                field[rng.randrange(len(field))] = rng.choice([-100, -1, 0, 1, 2, 1000])
                return True
        return None
    return True


def drop_attribute(model: ModelProto, rng: random.Random) -> Any:
    node = node_of(model, rng)
    if not node.attribute:
        return None
    del node.attribute[rng.randrange(len(node.attribute))]
    return True


def operator(model: ModelProto, rng: random.Random) -> Any:
    names = ["Add", "Div", "Mod", "MatMul", "Conv", "Gather", "Reshape", "Softmax", "TopK", "Pad",
             "Expand", "Slice", "Concat", "Cast", "Identity", "LayerNormalization", "Gemm", "Loop",
             "Resize", "GRU", "NonZero", "Nonsense", "Einsum", "ScatterND", "MaxPool"]  # fmt: skip
    node_of(model, rng).op_type = rng.choice(names)
    return True


def drop_input(model: ModelProto, rng: random.Random) -> Any:
    node = node_of(model, rng)
    if not node.input:
        return None
    k = rng.randrange(len(node.input))
    if rng.random() < 0.5:
        node.input[k] = ""
    else:
        del node.input[k]
    return True


def swap_inputs(model: ModelProto, rng: random.Random) -> Any:
    node = node_of(model, rng)
    if len(node.input) < 2:
        return None
    a, b = rng.sample(range(len(node.input)), 2)
    names = list(node.input)
    names[a], names[b] = names[b], names[a]
    del node.input[:]
    node.input.extend(names)
    return True


def rewire(model: ModelProto, rng: random.Random) -> Any:
    node = node_of(model, rng)
    names = [i.name for i in model.graph.input] + [n for o in model.graph.node for n in o.output]
    if not node.input:
        return None
    node.input[rng.randrange(len(node.input))] = rng.choice([*names, "nowhere"])
    return True


def extra_input(model: ModelProto, rng: random.Random) -> Any:
    node_of(model, rng).input.append(rng.choice([i.name for i in model.graph.input] or ["x"]))
    return True


def input_type(model: ModelProto, rng: random.Random) -> Any:
    if not model.graph.input:
        return None
    rng.choice(list(model.graph.input)).type.tensor_type.elem_type = rng.choice(range(26))
    return True


def input_shape(model: ModelProto, rng: random.Random) -> Any:
    if not model.graph.input:
        return None
    shape = rng.choice(list(model.graph.input)).type.tensor_type.shape
    if not shape.dim:
        return None
    shape.dim[rng.randrange(len(shape.dim))].dim_value = rng.choice([0, 1, 2, 5, -1])
    return True


def constant(model: ModelProto, rng: random.Random) -> Any:
    if not model.graph.initializer:
        return None
    return tensor(rng.choice(list(model.graph.initializer)), rng)


def cycle(model: ModelProto, rng: random.Random) -> Any:
    node = rng.choice(list(model.graph.node))
    last = model.graph.node[-1]
    if not node.input or not last.output:
        return None
    node.input[rng.randrange(len(node.input))] = last.output[0]
    return True


def drop_node(model: ModelProto, rng: random.Random) -> Any:
    del model.graph.node[rng.randrange(len(model.graph.node))]
    return True


def opset(model: ModelProto, rng: random.Random) -> Any:
    rng.choice(list(model.opset_import)).version = rng.choice([0, 1, 7, 11, 13, 18, 22, 23, 99])
    return True


def output_name(model: ModelProto, rng: random.Random) -> Any:
    if not model.graph.output:
        return None
    rng.choice(list(model.graph.output)).name = "nowhere"
    return True


def feeds_for(model: ModelProto, arrays: list[Any], rng: random.Random) -> dict[str, Any]:
    """The case's feeds, now and then cast and reshaped to what the mutated inputs declare."""
    feeds = {}
    for info, given in zip(model.graph.input, arrays, strict=False):
        array = onnx.numpy_helper.to_array(given) if isinstance(given, TensorProto) else given
        if isinstance(array, np.ndarray) and array.dtype != object and rng.random() < 0.8:
            kind = info.type.tensor_type
            try:
                wanted = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
                dims = [d.dim_value for d in kind.shape.dim]
                if (
                    len(dims) == array.ndim
                    and list(array.shape) != dims
                    and min(dims, default=1) >= 0
                ):
                    array = np.resize(array, dims)
                with np.errstate(all="ignore"):
                    array = array.astype(wanted) if wanted.kind != "O" else array
            except Exception:
                pass
        feeds[info.name] = array
    return feeds


def oracle(run: Any) -> Any:
    try:
        with np.errstate(all="ignore"):
            return run()
    except Exception as error:
        return error


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) or isinstance(b, (list, tuple)):
        return (
            isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )  # fmt: skip
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    if "U" in (a.dtype.kind, b.dtype.kind):
        a, b = a.astype(object), b.astype(object)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object or a.dtype.kind in "biuU":
        return bool(np.array_equal(a, b))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    loose = a.dtype.itemsize < 4
    return np.allclose(
        a.astype(wide),
        b.astype(wide),
        rtol=3e-2 if loose else 2e-3,
        atol=1e-2 if loose else 1e-5,
        equal_nan=True,
    )


def _scalars_stacked(reference: Any, got: Any) -> Any:
    """ONNX's reference stacks a loop's scalars as a column, (n, 1), where (n,) is defined."""
    column = isinstance(reference, np.ndarray) and reference.shape[-1:] == (1,)
    if column and reference.ndim == 2 and np.ndim(got) == 1:
        return reference[:, 0]
    return reference


def judge(model: ModelProto, feeds: dict[str, Any]) -> tuple[str, str]:
    """("refused" | "agrees" | "differs" | "alone" | "untyped", detail)."""
    try:
        evaluator = TorchOnnxEvaluator(model)
        wanted = {n: feeds[n] for n in evaluator.input_names if n in feeds}
        got = [to_numpy(x) for x in evaluator.run(None, wanted)]
    except RoundoffError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "untyped", f"{type(error).__name__}: {error}"
    reference = oracle(lambda: ReferenceEvaluator(model).run(None, dict(wanted)))
    if not isinstance(reference, Exception):
        reference = [_scalars_stacked(r, g) for r, g in zip(reference, got, strict=False)]
        if same(got, reference):
            return "agrees", "reference"

    def by_ort() -> Any:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        released = ModelProto()
        released.CopyFrom(model)
        for imported in released.opset_import:  # ONNX Runtime refuses what is not released
            imported.version = min(imported.version, 26)
        session = onnxruntime.InferenceSession(
            released.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(None, {n: np.asarray(x) for n, x in wanted.items()})

    ort = oracle(by_ort)
    if not isinstance(ort, Exception) and same(got, ort):
        return "agrees", "ort"
    if isinstance(reference, Exception) and isinstance(ort, Exception):
        return "alone", f"reference: {str(reference)[:200]} | ort: {str(ort)[:200]}"
    return "differs", f"ours {got} | reference {reference} | ort {ort}"[:1500]


def main(seed: int, count: int, only: int | None = None) -> None:
    """Run *count* cases and print a JSON line before and after each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = sources()
    for k in range(count) if only is None else [only]:
        rng = random.Random(f"{seed}-{k}")
        case = cases[rng.randrange(len(cases))]
        model, kind = mutate(case.model, rng)
        print(json.dumps({"start": k, "case": case.name, "kind": kind}), flush=True)
        started = time.perf_counter()
        verdict, detail = judge(model, feeds_for(model, case.data_sets[0][0], rng))
        print(json.dumps({"end": k, "verdict": verdict, "detail": detail,
                          "seconds": time.perf_counter() - started}), flush=True)  # fmt: skip
        if only is not None:
            print(onnx.printer.to_text(model))


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:]))
