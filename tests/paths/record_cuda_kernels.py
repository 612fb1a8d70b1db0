"""Write down which kinds of nodes ONNX Runtime runs on a GPU, on a machine that has one.

    python3 tests/paths/record_cuda_kernels.py tests/data/cuda_kernels.json

The nodes are those of the decoders of ``test_generate.py``, by every cache and mode and in three
types, fused for a GPU. Each partition is loaded without optimisation, and ONNX Runtime says where
each node goes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import graph_stand_in
import test_generate

from roundoff.backend.program import Program
from roundoff.ort import session

KINDS = ("Llama", "Qwen2", "Gemma", "GPT2")


def partitions(kind: str, patch: pytest.MonkeyPatch) -> Iterator[onnx.ModelProto]:
    """Every partition that a decoder takes."""
    seen: list[onnx.ModelProto] = []
    opened = Program._session

    def noted(self: Any, part: onnx.ModelProto, *rest: Any) -> Any:
        seen.append(part)
        return opened(self, part, *rest)

    graph_stand_in.as_on_a_gpu(patch)
    patch.setattr(Program, "_session", noted)
    patch.setattr(test_generate, "DEVICE", "cpu")
    patch.setattr(test_generate, "CUDA", False)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, rows in itertools.product(dtypes, (1, 3)):
        for options, more in test_generate.MODES.values():
            torch._dynamo.reset()
            model = test_generate.decoder(kind).to(dtype)
            with test_generate.compiled(model, **options):
                try:
                    test_generate.write(model, test_generate.batch_of(rows, 9, 1), 3, **more)
                except Exception as e:  # a type without kernels on a processor: it is loaded
                    print(kind, dtype, options, str(e).splitlines()[0][:80])
    yield from seen


def assigned(model: onnx.ModelProto) -> dict[str, str]:
    """Kind of node -> execution provider."""
    model = onnx.shape_inference.infer_shapes(model)
    options = {"session.record_ep_graph_assignment_info": "1"}
    opened = session(model, ["CUDAExecutionProvider"], optimization="none", session_options=options)
    where = {
        node.name: part.ep_name
        for part in opened.raw.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    }
    return {kind: where[n.name] for kind, n in graph_stand_in.kinds(model) if n.name in where}


def table_of(kind: str) -> dict[str, str]:
    """What a decoder's partitions say."""
    table: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        for part in partitions(kind, patch):
            table |= assigned(part)
    return table


def main(path: str) -> None:
    """Write the table."""
    table: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(KINDS), context) as pool:
        for part in pool.map(table_of, KINDS):
            table |= part
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(table.items()))
    head = f'"onnxruntime": {json.dumps(onnxruntime.__version__)}'
    Path(path).write_text(f'{{{head}, "kernels": {{\n{lines}\n}}}}\n', "utf-8")
    print(f"{len(table)} kinds of nodes")


if __name__ == "__main__":
    main(sys.argv[1])
