r"""
.. _layer-norm-discrepancies:

PyTorch and ONNX Runtime give different results: why, and what to set
======================================================================

LayerNormalization, a matrix product and an addition, with the same weights in both runtimes.

"""

# %%
# One model, two runtimes
# -----------------------
#
# The model is a piece of every transformer. "torch" runs it node by node with torch's kernels,
# "ORT" is one ``InferenceSession``. Everything is drawn once in float32 and rounded to each type.

from functools import partial
from typing import NamedTuple

import onnxruntime
import pandas as pd
import torch

from roundoff.compare import max_diff, scaled_error, tolerance, tolerance_used
from roundoff.dtypes import dtype_info, onnx_dtype_to_torch_dtype, ulp
from roundoff.errors import UnsupportedError
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.graph import onnx_simple_text_plot, plot_dot
from roundoff.localize import Way, localize
from roundoff.models import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from roundoff.ort import available, run_apart, session
from roundoff.page import Study
from roundoff.reductions import tensor_core_matmul
from roundoff.runtimes import compare_runtimes
from roundoff.script import get_parsed_args, unit_test_going
from roundoff.timing import measure, torch_precision

args = get_parsed_args(
    "plot_layer_norm_discrepancies",
    __doc__,
    width=(64 if unit_test_going() else 1152, "inner size"),
    rows=(1024, "rows of X in a batch item"),
)
study = Study("plot_layer_norm_discrepancies", args)
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16
providers = available([CPU, CUDA] if torch.cuda.is_available() else [CPU])

print(onnx_simple_text_plot(layer_norm_matmul()))

# %%

study.svg(
    "model",
    plot_dot(layer_norm_matmul()),
    alt="X, scale and bias enter LayerNormalization; its result and weights enter MatMul; "
    "its result and bias2 enter Add, which gives Z.",
)

# %%
# A case is a device, a type and, for float32 on a GPU, who may multiply in TF32: ONNX Runtime
# alone (what you get when you set nothing), both, neither, or torch alone.

TF32 = {"ORT alone": (True, False), "both": (True, True), "neither": (False, False),
        "torch alone": (False, True)}  # fmt: skip


class Case(NamedTuple):
    provider: str
    itype: int
    tf32: str = ""

    @property
    def columns(self):
        short, dtype = self.provider.removesuffix("ExecutionProvider"), dtype_info(self.itype).name
        where = "GPU" if short == "CUDA" else short
        case = f"{where} {dtype}" + (f", TF32 in {self.tf32}" if self.tf32 else "")
        return {"case": case, "provider": short, "dtype": dtype, "tf32": self.tf32}

    @property
    def uses_tf32(self):
        return TF32.get(self.tf32, (False, False))

    def feeds(self, weights="uniform"):
        batch = 32 if self.provider == CUDA else 2
        feeds = layer_norm_feeds(args.rows, args.width, batch=batch, weights=weights)
        dtype = onnx_dtype_to_torch_dtype(self.itype)
        device = "cuda" if self.provider == CUDA else "cpu"
        return {name: value.to(dtype).to(device) for name, value in feeds.items()}

    def evaluator(self, **options):
        cuda = (CUDA, {"use_tf32": int(self.uses_tf32[0])})
        provider = cuda if self.provider == CUDA else CPU
        return TorchOnnxEvaluator(layer_norm_matmul(self.itype), [provider], **options)

    def torch(self, feeds):
        with torch_precision(self.uses_tf32[1]):
            return self.evaluator().run(None, feeds)[0]

    def ort(self, feeds, **options):
        options = {"tf32": self.uses_tf32[0]} | options
        return session(layer_norm_matmul(self.itype), [self.provider], **options).run(feeds)[0]


cases = [Case(p, t) for p in providers for t in (FLOAT32, FLOAT16, BFLOAT16) if (p, t) != (CUDA, 1)]
cases += [Case(CUDA, FLOAT32, tf32) for tf32 in TF32 if CUDA in providers]

# %%
# How far apart they are, and who is nearer the truth
# ---------------------------------------------------
#
# The truth is the same model in float64 from the first operation to the last. Errors are given
# in :ref:`one unit <unit>`: ε of the type times the root mean square of the truth.

gaps = []
for case in cases:
    feeds = case.feeds()
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    results = {"torch": case.torch(feeds)}
    try:
        results["ORT"] = case.ort(feeds)
        apart = max_diff(results["ORT"], results["torch"], hist=[0])
        near = float(ulp(apart["got"], case.itype))
        row = {"abs": apart["abs"], "ulp there": apart["abs"] / near,
               "share": apart["rep"][">0.0"] / apart["n"], "rel": apart["rel"]}  # fmt: skip
    except UnsupportedError:
        row = {"status": "ONNX Runtime has no such kernel"}
    for runtime, z in results.items():
        error = scaled_error(truth, z)
        row |= {f"{runtime} error": error.rms, f"{runtime} largest": error.largest,
                f"{runtime} abs": error.abs, f"{runtime} mean": error.mean}  # fmt: skip
    gaps.append(case.columns | row)
study.table(
    "gaps",
    pd.DataFrame(gaps),
    "Z of torch against Z of ONNX Runtime, and the typical error of each against float64.",
    columns=["case", "abs", "share", "torch error", "ORT error"],
)

# %%

study.dots(
    "gaps",
    of="gaps",
    where={"abs": lambda s: s.notna()},
    x="abs",
    label="case",
    log=True,
    title="Largest |torch − ORT| of Z",
    xlabel="absolute difference",
    answer=True,
    alt="A dot for each device, type and setting of TF32: the largest difference between the two "
    "runtimes. In float32 on a GPU TF32 on one side alone stands a hundred times above TF32 on "
    "neither; the 16-bit types stand highest.",
)  # fmt: skip

# %%
# Swap one operator at a time
# ---------------------------
#
# Run torch everywhere but for one operator of ONNX Runtime's, and see how far Z moves from each of
# the two pure runs.

SWAPS = {"LayerNormalization": LayerNormalizationOrt, "MatMul": MatMulOrt}
usable = [case for case, row in zip(cases, gaps, strict=True) if "status" not in row]
plain = [case for case in usable if not case.uses_tf32[1]]  # torch as it comes
blame = []
for case in plain:
    feeds = case.feeds()
    pures = {"torch": case.torch(feeds), "ORT": case.ort(feeds)}
    for op, kernel in SWAPS.items():
        swapped = case.evaluator(custom_kernels={("", op): kernel})
        z = swapped.run(None, feeds)[0]
        far = {f"from {side}": max_diff(pure, z)["abs"] for side, pure in pures.items()}
        names = ", ".join(swapped.kernels_used().values())
        blame.append(case.columns | {"swapped": op} | far | {"kernels": names})
blame = pd.DataFrame(blame)
study.table(
    "blame",
    blame,
    "How far Z moves when one operator of torch's run becomes ONNX Runtime's.",
    columns=["case", "swapped", "from torch", "from ORT"],
    rows={"dtype": "float32"},
)

# %%

study.dots(
    "blame",
    of="blame",
    x="from torch",
    label="case",
    colour="swapped",
    log=True,
    title="How far Z moves from torch's, one operator swapped",
    xlabel="largest absolute difference",
    alt="Two dots for each device and type: how far Z moves from torch's result when "
    "LayerNormalization, or MatMul, is ONNX Runtime's.",
)

# %%
# Origin and size are two questions
# ---------------------------------
#
# The walk along the nodes (:func:`roundoff.localize.localize`) gives each node's two kernels the
# same inputs (*isolated*) and follows the two runs (*propagated*).

nodes, carried = [], []
for case in plain:
    feeds = case.feeds()
    walk = localize(Way("torch", case.evaluator()), Way("ORT", case.evaluator(kernels="ort")),
                    feeds, truth=case.evaluator(truth=True))  # fmt: skip
    for row in walk.frame.to_dict("records"):
        nodes.append(case.columns | {k: row[k] for k in ("op", "isolated abs", "propagated abs",
                                                         "isolated bias")})  # fmt: skip
    normed = [case.evaluator(custom_kernels=swap).run(["normed", "Z"], feeds)
              for swap in ({}, {("", "LayerNormalization"): LayerNormalizationOrt})]  # fmt: skip
    (n0, z0), (n1, z1) = [[t.double() for t in pair] for pair in normed]
    exact = (n1 - n0) @ feeds["weights"].double()
    rms = {"in normed": n1 - n0, "carried": exact, "in Z": z1 - z0}
    carried.append(case.columns | {k: float(v.square().mean().sqrt()) for k, v in rms.items()})
study.table(
    "nodes",
    pd.DataFrame(nodes),
    "Largest difference between the two kernels of a node on the same inputs, and between the "
    "two runs.",
    columns=["case", "op", "isolated abs", "propagated abs"],
    rows={"dtype": "float32"},
)

# %%
# LayerNormalization's own difference goes through the product exactly, by float64, and what is
# left is the rounding of product and sum, which one changed bit of their input draws anew:

study.table(
    "carried",
    pd.DataFrame(carried),
    "Root mean square of the difference that ONNX Runtime's LayerNormalization makes: in its "
    "result, carried through the product in float64, and in Z.",
)

# %%
# Why TF32's error has a sign
# ---------------------------
#
# Tensor cores align a block of products to the largest and cut what is below their last bit, and
# so the sum is always too small [#fasi]_. :func:`roundoff.reductions.tensor_core_matmul` simulates
# it with the blocks and bits published for two GPUs, on operands that TF32 holds exactly:

feeds = Case(CPU, FLOAT32).feeds()
x = Case(CPU, FLOAT32).evaluator().run(["normed"], feeds)[0][0, :32]
w = feeds["weights"][:, :64]
held = x.half().float(), w.half().float()  # 11 bits, as TF32 has
SIMULATED = {
    "operands rounded to TF32, sum exact": (x, w, {"accumulate": "nearest"}),
    "operands cut to TF32, sum exact": (x, w, {"accumulate": "nearest", "convert": "truncate"}),
    "sum cut as an A100 does": (*held, {"block": 4, "bits": 25}),
    "sum cut as an H100 does": (*held, {"block": 8, "bits": 26}),
}
signs = []
for name, (a, b, options) in SIMULATED.items():
    z = tensor_core_matmul(a, b, operands="tf32", **options)
    signs.append((f"simulated: {name}", "CPU", scaled_error(a.double() @ b.double(), z)))
for case in cases[-4:] if CUDA in providers else ():
    feeds = case.feeds()
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    for runtime, used in zip(("ORT", "torch"), case.uses_tf32, strict=True):
        z = case.ort(feeds) if runtime == "ORT" else case.torch(feeds)
        what = f"measured: {runtime}, TF32 {'on' if used else 'off'}"
        signs.append((what, "CUDA", scaled_error(truth, z)))
signs = [{"what": w, "provider": p, "mean error": e.mean, "rms error": e.rms} for w, p, e in signs]
study.table(
    "signs",
    pd.DataFrame(signs).drop_duplicates("what"),
    "Mean and typical error of the product with operands in TF32, simulated and measured.",
)

# %%
# Every switch, and what it costs
# -------------------------------
#
# Each setting of each runtime, alone: how many elements of its own result it moves, how far it is
# from the other runtime as it comes, the typical error, and the time over its own default.


def flag(name):
    """How a switch of torch's products on a GPU is set and read."""
    products = torch.backends.cuda.matmul
    return partial(setattr, products, name), partial(getattr, products, name)


deterministic = onnxruntime.SessionOptions()
deterministic.use_deterministic_compute = True
denormal, skip = "session.set_denormal_as_zero", "enable_skip_layer_norm_strict_mode"
ORT = {  # switch: where it acts, options of roundoff.ort.session
    "default": ("", {}),
    "graph optimisation off": ("", {"optimization": "none"}),
    "use_deterministic_compute": ("", {"session_options": deterministic}),
    denormal: ("CPU", {"session_options": {denormal: "1"}}),
    "one thread": ("CPU", {"threads": 1}),
    "use_tf32 = 0": ("CUDA float32", {"tf32": False}),
    skip: ("CUDA float16", {"provider_options": {skip: 1}}),
}
TORCH = {  # switch: where it acts, how it is set and read, the value
    "default": ("", lambda v: None, lambda: None, None),
    "use_deterministic_algorithms": ("CPU", torch.use_deterministic_algorithms,
                                     torch.are_deterministic_algorithms_enabled, True),
    "one thread": ("CPU", torch.set_num_threads, torch.get_num_threads, 1),
    "set_flush_denormal": ("CPU", torch.set_flush_denormal, lambda: False, True),
    "set_float32_matmul_precision = high": (
        "CUDA float32", torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision, "high"),
    "allow_fp16_accumulation": ("CUDA float16", *flag("allow_fp16_accumulation"), True),
    "allow_fp16_reduced_precision_reduction = False": (
        "CUDA float16", *flag("allow_fp16_reduced_precision_reduction"), False),
    "allow_bf16_reduced_precision_reduction = False": (
        "CUDA bfloat16", *flag("allow_bf16_reduced_precision_reduction"), False),
}  # fmt: skip


def with_switch(evaluator, feeds, put, get, value):
    """torch's run, with a switch set for its time."""
    before = get()
    put(value)
    try:
        return evaluator.run(None, feeds)[0]
    finally:
        put(before)


switches = []
for case in plain:
    if case.tf32 == "neither":
        continue
    feeds, model = case.feeds(), layer_norm_matmul(case.itype)
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    provider, name = case.columns["provider"], case.columns["dtype"]
    calls, here = {}, ("", provider, f"{provider} {name}")
    for switch, (where, options) in ORT.items():
        if where in here:
            run = session(model, [case.provider], **{"tf32": True} | options).bind(feeds).run
            calls["ORT", switch] = lambda run=run: run()[0]
    for switch, (where, *how) in TORCH.items():
        if where in here:
            calls["torch", switch] = partial(with_switch, case.evaluator(), feeds, *how)
    results = {key: call().clone() for key, call in calls.items()}
    times = measure({": ".join(key): call for key, call in calls.items()}, warmup=1, min_rounds=5,
                    budget_s=0.05 if unit_test_going() else 2.0,
                    device="cuda" if case.provider == CUDA else "cpu")  # fmt: skip
    medians = times.frame.set_index("label")["median"]
    if "CUDA float16" in here:  # an environment variable that a process reads once
        for value in ("1: float16 sums", "2: no split reduction", "4: pedantic"):
            (z,) = run_apart(model, feeds, {"ORT_CUDA_GEMM_OPTIONS": value[0]}, [CUDA], tf32=True)
            results["ORT", f"ORT_CUDA_GEMM_OPTIONS = {value}"] = z.to("cuda")
    for (runtime, switch), z in results.items():
        other = results["torch" if runtime == "ORT" else "ORT", "default"]
        apart, error = max_diff(other, z, hist=[0]), scaled_error(truth, z)
        own = results[runtime, "default"]
        moved = float("nan") if z is own else float((z != own).float().mean())
        cost = medians.get(f"{runtime}: {switch}", float("nan")) / medians[f"{runtime}: default"]
        switches.append(case.columns | {
            "runtime": runtime, "switch": switch, "moved": moved, "abs": apart["abs"],
            "share": apart["rep"][">0.0"] / apart["n"], "rms error": error.rms,
            "mean error": error.mean, "cost": cost})  # fmt: skip
study.table(
    "switches",
    pd.DataFrame(switches),
    "Each switch alone, where it moves a result: distance from the other runtime's default, "
    "typical error, time over its own default.",
    columns=["switch", "runtime", "case", "abs", "rms error", "cost"],
    rows={"moved": lambda s: s.isna() | (s > 0)},
    times=["cost"],
)

# %%
# In float16, look for overflow before rounding
# ---------------------------------------------
#
# RMSNorm squares its input, and in float16 nothing above 255.9 has a square. One large channel, as
# deep transformers have [#massive]_, in one of two sequences:

generator = torch.Generator().manual_seed(1)
x, residual = (torch.rand(2, 32, 64, generator=generator) * 4 - 2 for _ in range(2))
residual[1, :, 7] *= 400
large = {"X": x.half(), "residual": residual.half(), "scale": torch.ones(64).half()}
half, single = (
    Way(
        dtype_info(i).name,
        TorchOnnxEvaluator(residual_rms_norm(i)),
        dtype=onnx_dtype_to_torch_dtype(i),
    )
    for i in (FLOAT16, FLOAT32)
)
overflow = localize(half, single, large)
print("first value that is not finite:", overflow.first_non_finite()["outputs"])

remedies = []
for name, wide in (("as written", False), ("squares in float32", True)):
    model = residual_rms_norm(FLOAT16, wide=wide)
    exact = TorchOnnxEvaluator(model, truth=True).run(None, large)[0]
    for provider in providers:
        results = {"torch": TorchOnnxEvaluator(model, [provider]).run(None, large)[0],
                   "ORT": session(model, [provider]).run(large)[0]}  # fmt: skip
        for runtime, z in results.items():
            row = {
                "model": name,
                "runtime": runtime,
                "provider": provider.removesuffix("ExecutionProvider"),
            }
            remedies.append(row | {"rows of zeros": int((z == 0).all(dim=-1).sum()),
                                   "rows": z.shape[0] * z.shape[1],
                                   "error": scaled_error(exact, z.cpu()).largest})  # fmt: skip
study.table(
    "remedies",
    pd.DataFrame(remedies),
    "RMSNorm in float16 with one channel near 800: rows of the output that are all zeros.",
)

# %%
# The tolerance to ship
# ---------------------
#
# What rounding alone can do (:func:`roundoff.compare.tolerance`), relative to |X||W| + |bias|
# element by element, since with weights of both signs a sum can cancel to nearly nothing:
# rounding to nearest with a probability of 1 − 10⁻⁹ for the whole tensor on a CPU and for float32
# without TF32, truncation always on tensor cores. The addition and the type of Z round once more.

ASSERT_CLOSE = {FLOAT32: (1.3e-6, 1e-5), FLOAT16: (1e-3, 1e-5), BFLOAT16: (1.6e-2, 1e-5)}
limits = []
for weights in ("uniform", "normal"):
    for case in usable:
        feeds = case.feeds(weights)
        normed, exact = case.evaluator(truth=True).run(["normed", "Z"], feeds)
        size = normed.abs() @ feeds["weights"].double().abs() + feeds["bias2"].double()
        results = case.torch(feeds), case.ort(feeds)
        cores = case.provider == CUDA and (case.itype != FLOAT32 or any(case.uses_tf32))
        kind = (
            {"rounding": "truncation"}
            if cores
            else {"confidence": 1 - 1e-9, "elements": exact.numel()}
        )
        name = dtype_info(case.itype).name
        operands = "tf32" if any(case.uses_tf32) else name
        limit = tolerance(name, args.width, "float32", operands=operands, **kind)
        limit += dtype_info(case.itype).eps / 2
        rtol, atol = ASSERT_CLOSE[case.itype]
        far = (results[0] - results[1]).abs() > atol + rtol * results[1].abs()
        limits.append(case.columns | {
            "weights": weights, "tolerance": 2 * limit,
            "used": tolerance_used(*results, size, limit),
            "condition": float((size / exact.abs()).max()),
            "assert_close": float(far.float().mean())})  # fmt: skip
        del normed, exact, size, results
study.table(
    "limits",
    pd.DataFrame(limits),
    "The tolerance, the share of it that the two runtimes use, and the share of elements that "
    "torch.testing.assert_close refuses with its defaults.",
    columns=["case", "weights", "tolerance", "used", "assert_close"],
)

# %%
# Your own model
# --------------
#
# Put in an ONNX file, its inputs if random ones will not do, and the module that it was exported
# from, if there is one.

MODEL = layer_norm_matmul(FLOAT16)  # or "model.onnx"
FEEDS = None  # or {"input_ids": ids}: random ones where nothing is given
MODULE = None  # or the torch module
compare_runtimes(MODEL, FEEDS, module=MODULE)

# %%
# Limits, and what to read next
# -----------------------------

study.finish()
