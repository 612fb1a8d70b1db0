"""How fast does ``generate`` write, called as people call it, and does it write the right text?

A trained model, SmolLM2-135M-Instruct, in float16 on a GPU and in float32 on a processor, answers
one question and eight. Each way is a process of its own. It writes a first text, which compiles
what the way compiles; all processes do so at the same time. Then the ways take turns, text by
text: a rate is that of a whole text, new tokens over seconds, prefill included.

A rate says something only of a right text. So the texts that were timed are read again by the
model in float64: *behind* is how far the logit of a written token is from the best one at its
place, at worst. Rounding alone leaves a fraction of a logit; eager's own is beside it.

    python studies/generate.py             # measures, and prints the table
    python studies/generate.py --record    # also writes it into the record of plot_whole_model
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from transformers import CompileConfig

from roundoff.backend import onnx_custom_backend
from roundoff.errors import ArgumentError
from roundoff.models import Float64Llama, load_trained, padded, prompts
from roundoff.page import Study
from roundoff.script import get_parsed_args

#: Way -> options of torch.compile, those of generate, and whether transformers compiles by itself.
WAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any], bool]] = {
    "eager": (None, {}, False),
    "eager, static cache": (None, {"cache_implementation": "static"}, False),
    "inductor": ({"dynamic": True}, {}, False),
    "inductor, reduce-overhead": (None, {"cache_implementation": "static"}, True),
    "roundoff": ({"backend": onnx_custom_backend, "dynamic": True}, {}, False),
    "roundoff, CUDA graph": (
        {"backend": onnx_custom_backend, "mode": "reduce-overhead", "dynamic": False},
        {"cache_implementation": "static"},
        False,
    ),
    # transformers compiles the decode step alone, and with the backend that it is given.
    "roundoff, compile_config": (
        None,
        {
            "cache_implementation": "static",
            "compile_config": CompileConfig(
                backend=onnx_custom_backend, mode="reduce-overhead", dynamic=False
            ),
        },
        True,
    ),
}


@contextlib.contextmanager
def compiled(model: Any, options: dict[str, Any] | None) -> Iterator[None]:
    """The model with its forward compiled, where the way compiles it."""
    plain = model.forward
    if options is not None:
        model.forward = torch.compile(plain, **options)
    yield
    model.forward = plain


def one_way(pipe: Any, way: str, rows: int, tokens: int, layers: int | None, dtype: str) -> None:
    """A process: writes a text whenever it is told to; None ends it."""
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_trained(layers=layers)
    asked = [trained.prompt(words) for _, words in prompts(rows)]
    model = trained.model(getattr(torch, dtype), device=device)
    ids, mask = padded(asked, model.config.pad_token_id, device)
    options, more, by_transformers = WAYS[way]
    more = more | {"disable_compile": not by_transformers, "do_sample": False}
    more |= {"max_new_tokens": tokens, "min_new_tokens": tokens}
    with compiled(model, options):
        while pipe.recv() is not None:
            start = time.perf_counter()
            try:
                made = model.generate(input_ids=ids, attention_mask=mask, **more)
                written = made[:, ids.shape[1] :].tolist()  # waits for the GPU
            except Exception as error:
                pipe.send((str(error).splitlines()[0], 0.0))
                return
            pipe.send((written, time.perf_counter() - start))


class Writer:
    """A way in a process of its own."""

    def __init__(self, *task: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=one_way, args=(other, *task), daemon=True)
        self._process.start()
        self.texts: list[Any] = []
        self.seconds: list[float] = []
        self.failure = ""

    def ask(self) -> None:
        """Begin a text."""
        self._pipe.send(True)

    def answer(self) -> None:
        """Wait for it."""
        written, seconds = self._pipe.recv()
        if isinstance(written, str):
            self.failure = written
        else:
            self.texts.append(written)
            self.seconds.append(seconds)

    def end(self) -> None:
        """Let its memory go."""
        if not self.failure:
            self._pipe.send(None)
        self._process.join()


@torch.no_grad()
def behind(truth: Float64Llama, asked: list[list[int]], written: list[list[int]]) -> float:
    """How far a written token's logit is from the best at its place, at worst, by float64.

    A text of a fixed length may not end: the tokens that would end it do not count.
    """
    ends = truth.config.eos_token_id
    worst = 0.0
    for question, answer in zip(asked, written, strict=True):
        ids = torch.tensor([question + answer], device=truth.device)
        logits = truth(ids, logits_to_keep=len(answer) + 1).logits[0, :-1]
        logits[:, ends] = -torch.inf
        chosen = logits.gather(1, ids[0, len(question) :, None])
        worst = max(worst, float((logits.max(1, keepdim=True).values - chosen).max()))
    return worst


def first_texts(batches: list[int], ways: list[str], args: Any) -> dict[int, dict[str, Writer]]:
    """Writers of each number of rows, a process a way: all write a first text at the same time."""
    writers: dict[int, dict[str, Writer]] = {}
    for rows in batches:
        # Symbolic sizes take longest to trace: one row tells.
        chosen = [w for w in ways if rows == 1 or (WAYS[w][0] or {}).get("dynamic") is not True]
        writers[rows] = {
            way: Writer(way, rows, args.tokens, args.layers or None, args.dtype) for way in chosen
        }
    everyone = [writer for of in writers.values() for writer in of.values()]
    for writer in everyone:
        writer.ask()
    for writer in everyone:
        writer.answer()
    return writers


def contest(rows: int, writers: dict[str, Writer], args: Any) -> list[dict[str, Any]]:
    """A row for each way: seconds of the first text, tokens a second, and whether it is right."""
    for _ in range(args.rounds + 1):  # a CUDA graph is recorded while the second text is written
        for writer in writers.values():
            if not writer.failure:
                writer.ask()
                writer.answer()
    for writer in writers.values():
        writer.end()
    trained = load_trained(layers=args.layers or None)
    truth = Float64Llama(trained, "cuda" if torch.cuda.is_available() else "cpu")
    asked = [trained.prompt(words) for _, words in prompts(rows)]
    eager, found = writers["eager"], []
    for way, writer in writers.items():
        row = {
            "optimization": way,
            "dtype": args.dtype,
            "batch": rows,
            "tokens": rows * args.tokens,
        }
        row |= {"failure": writer.failure or None}
        if not writer.failure:
            timed, usual = writer.seconds[2:], eager.seconds[2:]
            ratios = sorted(b / a for a, b in zip(timed, usual, strict=True))
            row |= {
                "behind": max(behind(truth, asked, t) for t in unlike(writer.texts)),
                "not eager's": sum(
                    a != b
                    for ours, theirs in zip(writer.texts[-1], eager.texts[-1], strict=True)
                    for a, b in zip(ours, theirs, strict=True)
                ),
                "different texts": len(unlike(writer.texts)),
                "first text": writer.seconds[0],
                "tokens/s": rows * args.tokens / sorted(timed)[len(timed) // 2],
                "× eager": ratios[len(ratios) // 2],
                "low": ratios[0],
                "high": ratios[-1],
            }
        found.append(row)
    return found


def unlike(texts: list[Any]) -> list[Any]:
    """Each text once."""
    return [t for i, t in enumerate(texts) if t not in texts[:i]]


def main() -> None:
    """Measure and show."""
    cuda = torch.cuda.is_available()
    args = get_parsed_args(
        "generate",
        __doc__,
        layers=(0, "layers of the model; 0: all", (0, 30)),
        tokens=(128, "new tokens of a text", (2, 1000)),
        rounds=(5, "texts that are timed", (1, 100)),
        batch=("1,8", "questions at once, such as 1,8"),
        ways=("", "some of the ways, joined by ;"),
        dtype=("float16" if cuda else "float32", "type of the model", ["float16", "float32"]),
    )
    study = Study("plot_whole_model", args)
    ways = args.ways.split(";") if args.ways else list(WAYS)
    if not {"eager"} <= set(ways) <= set(WAYS):
        raise ArgumentError(
            "ways", got=args.ways, expected=f"eager and others of {', '.join(WAYS)}, joined by ;"
        )
    found = []
    started = first_texts([int(rows) for rows in args.batch.split(",")], ways, args)
    for rows, writers in started.items():
        found += contest(rows, writers, args)
    frame = pd.DataFrame(found)
    frame["processor"] = "CUDA" if cuda else "CPU"
    times = ["first text", "tokens/s", "× eager", "low", "high"]
    study.table(
        "generate",
        frame,
        "generate, as it is called: seconds of the first text, tokens a second, and its text.",
        columns=["batch", "optimization", "first text", "tokens/s", "behind", "not eager's"],
        part="processor",
        times=times,
    )
    study.finish()


if __name__ == "__main__":
    main()
