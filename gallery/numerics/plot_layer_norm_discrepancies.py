r"""
.. _layer-norm-discrepancies:

Why PyTorch and ONNX Runtime give different results
===================================================

LayerNormalization and a matrix product: how far apart, who is right, and what to set.

.. answer:: nvidia-h200

   * **On a GPU in float32 it is a setting.** By default ONNX Runtime's ``CUDAExecutionProvider``
     multiplies in TF32 (11 of 24 bits), PyTorch does not: :bound:`0.0256 <tf32>` apart on results
     near 300. **PyTorch is nearer the truth**: ONNX Runtime's typical error is
     :bound:`32 <nearer>` times as large. With ``use_tf32`` off they are :bound:`0.00015 <tf32/2>`
     apart, and ONNX Runtime takes :bound:`about 4 <cost>` times as long here.
   * **On a GPU in float16 there is nothing to set**: :bound:`0.25 <half>` apart, float16's own step
     near 300, on :bound:`0.0043 <half/2>` % of the elements. But look for overflow.
   * **On a CPU in float32** the products add in other orders: :bound:`0.00027 <cpu>` apart, torch
     with :bound:`2.2 <cpu/3>` times ONNX Runtime's error.

   .. code-block:: python

      # TF32 in neither: products, and torch's convolutions, which use it by default
      onnxruntime.InferenceSession("model.onnx", providers=[
          ("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"])
      torch.set_float32_matmul_precision("highest")  # torch's default
      torch.backends.cudnn.allow_tf32 = False
"""

# %%
# One model, two runtimes
# -----------------------
#
# "torch" runs the ONNX graph node by node with torch's kernels, so that single operators can be
# swapped (:class:`~roundoff.evaluator.TorchOnnxEvaluator`); "ORT" is one ``InferenceSession``. X is
# uniform in ±60, scale, weights and biases are uniform in [0, 1), drawn in float32 and rounded to
# each type. A section below has weights of both signs.

from functools import partial
from typing import NamedTuple

import torch

from roundoff.compare import max_diff, scaled_error, tolerance, tolerance_used
from roundoff.dtypes import dtype_info, onnx_dtype_to_torch_dtype, ulp
from roundoff.errors import UnsupportedError
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.graph import plot_dot
from roundoff.localization import Runner, localize
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
    width=(64 if unit_test_going() else 1152, "inner size", 1),
    rows=(1024, "rows of X in a batch item", 1),
)
study = Study("plot_layer_norm_discrepancies", args)
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16
providers = available([CPU, CUDA] if torch.cuda.is_available() else [CPU])


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

TF32 = {
    "ORT alone": (True, False),
    "both": (True, True),
    "neither": (False, False),
    "torch alone": (False, True),
}


class Case(NamedTuple):
    provider: str
    itype: int
    tf32: str = ""

    @property
    def columns(self):
        short, dtype = self.provider.removesuffix("ExecutionProvider"), dtype_info(self.itype).name
        case = f"{short.replace('CUDA', 'GPU')} {dtype}" + (
            f", TF32 in {self.tf32}" if self.tf32 else ""
        )
        return {"case": case, "provider": short, "dtype": dtype, "tf32": self.tf32}

    @property
    def uses_tf32(self):
        return TF32.get(self.tf32, (False, False))

    def feeds(self, weights="uniform"):
        device, batch = ("cuda", 32) if self.provider == CUDA else ("cpu", 2)
        feeds = layer_norm_feeds(args.rows, args.width, batch=batch, weights=weights)
        dtype = onnx_dtype_to_torch_dtype(self.itype)
        return {name: value.to(dtype).to(device) for name, value in feeds.items()}

    def evaluator(self, **options):
        provider = self.provider, {"use_tf32": int(self.uses_tf32[0])}
        return TorchOnnxEvaluator(
            layer_norm_matmul(self.itype), [CPU if self.provider == CPU else provider], **options
        )

    def torch(self, feeds):
        with torch_precision(self.uses_tf32[1]):
            return self.evaluator().run(None, feeds)[0]

    def ort(self, feeds, **options):
        options = {"tf32": self.uses_tf32[0]} | options
        return session(layer_norm_matmul(self.itype), [self.provider], **options).run(feeds)[0]


cases = [Case(p, t) for p in providers for t in (FLOAT32, FLOAT16, BFLOAT16) if (p, t) != (CUDA, 1)]
cases += [Case(CUDA, FLOAT32, tf32) for tf32 in TF32 if CUDA in providers]

# %%
# TF32 on one side is the largest difference
# ------------------------------------------
#
# The truth is the same model in float64 from the first operation to the last. An error is given in
# :ref:`one unit <unit>`: ε of the type times the root mean square of the truth.

gaps = []
for case in cases:
    feeds = case.feeds()
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    results = {"torch": case.torch(feeds)}
    try:
        results["ORT"] = case.ort(feeds)
        apart = max_diff(results["ORT"], results["torch"], hist=[0])
        row = {
            "abs": apart["abs"],
            "ulp there": apart["abs"] / float(ulp(apart["got"], case.itype)),
            "share": apart["rep"][">0.0"] / apart["n"],
            "rel": apart["rel"],
        }
    except UnsupportedError:
        row = {"status": "ONNX Runtime has no such kernel"}
    for runtime, z in results.items():
        error = scaled_error(truth, z)
        row |= {
            f"{runtime} error": error.rms,
            f"{runtime} largest": error.largest,
            f"{runtime} abs": error.abs,
            f"{runtime} mean": error.mean,
        }
    gaps.append(case.columns | row)
study.table(
    "gaps",
    gaps,
    "Z of torch against Z of ONNX Runtime, and the typical error of each against float64.",
    columns=["case", "abs", "share", "torch error", "ORT error"],
    rows={"abs": lambda s: s.notna(), "tf32": lambda s: s != "torch alone"},
)

# %%

study.claim(
    "With TF32 in ONNX Runtime alone, as both come, Z differs by up to {0.0256}; with TF32 "
    "in neither by up to {0.00015}, with TF32 in both by up to {0.0020}.",
    name="tf32",
    of="gaps",
    where={"tf32": ["ORT alone", "neither", "both"]},
    on="nvidia-h200",
    value=lambda t: t.set_index("tf32")["abs"][["ORT alone", "neither", "both"]].tolist(),
)

# %%

study.claim(
    "As both come, ONNX Runtime's typical error is {32} times torch's.",
    name="nearer",
    of="gaps",
    where={"tf32": "ORT alone"},
    on="nvidia-h200",
    value=lambda t: t["ORT error"] / t["torch error"],
)

# %%

study.claim(
    "On a GPU in float16 they differ by up to {0.25}, one unit in the last place there, on "
    "{0.0043} % of the elements.",
    name="half",
    of="gaps",
    where={"provider": "CUDA", "dtype": "float16"},
    on="nvidia-h200",
    value=lambda t: (t["abs"], 100 * t["share"]),
    test=lambda t: t["ulp there"] == 1,
)

# %%

study.claim(
    "On a CPU {26} % of the float16 elements differ. ONNX Runtime has no float16 product "
    "there, computes in float32 and rounds less often: its typical error is {0.70} of "
    "torch's.",
    of="gaps",
    where={"provider": "CPU", "dtype": "float16"},
    on="nvidia-h200",
    value=lambda t: (100 * t["share"], t["ORT error"] / t["torch error"]),
)

# %%

study.claim(
    "On a CPU in float32 they differ by up to {0.00027}, on {77} % of the elements, and torch's "
    "typical error is {2.2} times ONNX Runtime's: their products add in other orders.",
    name="cpu",
    of="gaps",
    where={"case": "CPU float32"},
    on="nvidia-h200",
    value=lambda t: (t["abs"], 100 * t["share"], t["torch error"] / t["ORT error"]),
)

# %%

study.dots(
    "gaps",
    of="gaps",
    where={
        "abs": lambda s: s.notna(),
        "case": lambda s: ~s.isin(["GPU bfloat16", "GPU float32, TF32 in torch alone"]),
    },
    x="abs",
    label=lambda r: r["case"].replace("TF32 in ORT alone", "as both come"),
    log=True,
    title="PyTorch against ONNX Runtime",
    xlabel="largest difference",
    answer=True,
    alt="A dot for each device, type and setting of TF32: the largest difference between the two "
    "runtimes. In float32 on a GPU TF32 on one side alone stands a hundred times above TF32 on "
    "neither; float16 stands highest.",
)

# %%
# Swap one operator at a time: with TF32 it is the product
# --------------------------------------------------------
#
# Run torch everywhere but for one operator of ONNX Runtime's. How far does Z move from each of the
# two pure runs?

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
    where={"dtype": "float32"},
    x="from torch",
    label="case",
    colour="swapped",
    log=True,
    title="How far Z moves from torch's, one operator swapped",
    xlabel="largest absolute difference",
    alt="Two dots for each device and setting of TF32: how far Z moves from torch's result when "
    "LayerNormalization, or MatMul, is ONNX Runtime's.",
)

# %%

study.claim(
    "TF32 in ONNX Runtime's product moves Z {168} times as far as its LayerNormalization does.",
    of="blame",
    where={"tf32": "ORT alone"},
    on="nvidia-h200",
    value=lambda t: t["from torch"].iloc[1] / t["from torch"].iloc[0],
)

# %%

study.claim(
    "Without TF32 the two products agree bit for bit on a GPU at this size, in all three types.",
    of="blame",
    where={"provider": "CUDA", "swapped": "MatMul", "tf32": ["neither", ""]},
    test=lambda t: t["from torch"] == 0,
)

# %%
# On a GPU without TF32 it begins in LayerNormalization
# -----------------------------------------------------
#
# :func:`roundoff.localization.localize` goes from node to node: *isolated* is what a node's two
# kernels give on the same inputs, *propagated* what the two runs have come to.

nodes, carried = [], []
for case in plain:
    feeds = case.feeds()
    walk = localize(
        Runner("torch", case.evaluator()),
        Runner("ORT", case.evaluator(kernels="ort")),
        feeds,
        truth=case.evaluator(truth=True),
    )
    for row in walk.frame.to_dict("records"):
        nodes.append(
            case.columns
            | {k: row[k] for k in ("op", "isolated abs", "propagated abs", "isolated bias")}
        )
    normed = [
        case.evaluator(custom_kernels=swap).run(["normed", "Z"], feeds)
        for swap in ({}, {("", "LayerNormalization"): LayerNormalizationOrt})
    ]
    (n0, z0), (n1, z1) = [[t.double() for t in pair] for pair in normed]
    exact = (n1 - n0) @ feeds["weights"].double()
    rms = {"in normed": n1 - n0, "carried": exact, "in Z": z1 - z0}
    carried.append(case.columns | {k: float(v.square().mean().sqrt()) for k, v in rms.items()})
study.keep("carried", carried)
study.table(
    "nodes",
    nodes,
    "Largest difference between the two kernels of a node on the same inputs, and between the "
    "two runs.",
    columns=["case", "op", "isolated abs", "propagated abs"],
    rows={"provider": "CUDA", "dtype": "float32", "op": ["LayerNormalization", "MatMul"]},
)

# %%
# Carried through the product in float64, LayerNormalization's difference is a small part of what is
# found in Z. The rest is rounding: the product of a changed input rounds anew. With TF32 in both,
# one changed bit can move an operand by a unit of TF32, 2¹³ times as large.

study.claim(
    "On a GPU without TF32 LayerNormalization differs by up to {4.8e-7}, the product on the "
    "same inputs by nothing, and Z by up to {0.00015}.",
    name="origin",
    of="nodes",
    where={"provider": "CUDA", "tf32": "neither"},
    on="nvidia-h200",
    value=lambda t: (t["isolated abs"].max(), t["propagated abs"].max()),
    test=lambda t: t["isolated abs"][t["op"] == "MatMul"] == 0,
)

# %%

study.claim(
    "Carried exactly, it is {0.18} of the difference in Z, both as root mean squares.",
    of="carried",
    where={"tf32": "neither"},
    on="nvidia-h200",
    value=lambda t: t["carried"] / t["in Z"],
)

# %%
# TF32's error has a sign: tensor cores truncate
# ----------------------------------------------
#
# A tensor core aligns a block of products to the largest, cuts them to a fixed number of bits, and
# adds [#fasi]_: where most have one sign, the sum comes out too small.
# :func:`roundoff.reductions.tensor_core_matmul` simulates that with the blocks and bits published
# for two GPUs [#models]_, on operands that TF32 holds.


def tf32(x, add=0x1000):
    """float32 rounded to the 11 bits of TF32; cut where nothing is added."""
    return ((x.view(torch.int32) + add) & ~0x1FFF).view(torch.float32)


feeds = Case(CPU, FLOAT32).feeds()
x, w = Case(CPU, FLOAT32).evaluator().run(["normed"], feeds)[0], feeds["weights"]
few = tf32(x)[0, :32], tf32(w)[:, :64].contiguous()  # the simulation is slow
exact, small = x.double() @ w.double(), few[0].double() @ few[1].double()
SIMULATED = {
    "operands rounded to TF32": (exact, tf32(x).double() @ tf32(w).double()),
    "operands cut to TF32": (exact, tf32(x, 0).double() @ tf32(w, 0).double()),
    "sum cut as an A100 does": (small, tensor_core_matmul(*few, block=4, bits=25)),
    "sum cut as an H100 does": (small, tensor_core_matmul(*few, block=8, bits=26)),
}
signs = []
for name, (truth, z) in SIMULATED.items():
    e = scaled_error(truth, z, "float32")
    sizes = {"mean error": e.mean, "rms error": e.rms}
    signs.append({"what": f"simulated: {name}", "provider": "CPU"} | sizes)
for of in gaps[-3:-1] if CUDA in providers else ():
    for runtime in ("ORT", "torch"):
        what = f"measured: {runtime}, TF32 {'on' if of['tf32'] == 'both' else 'off'}"
        sizes = {"mean error": of[f"{runtime} mean"], "rms error": of[f"{runtime} error"]}
        signs.append({"what": what, "provider": "CUDA"} | sizes)
SIGNS = [
    "simulated: operands rounded to TF32",
    "simulated: sum cut as an H100 does",
    "measured: ORT, TF32 on",
    "simulated: operands cut to TF32",
]
study.table(
    "signs",
    signs,
    "Mean and typical error of the product with operands in TF32, simulated and measured.",
    columns=["what", "mean error", "rms error"],
)

# %%

study.claim(
    "Rounding the operands has a mean of {0.4}, an H100's truncated sums have {−46}, and {−45} is "
    "measured; operands that were cut would give about {−5700}.",
    of="signs",
    where={"what": SIGNS},
    on="nvidia-h200",
    value=lambda t: t.set_index("what")["mean error"].loc[SIGNS].tolist(),
)

# %%
# One switch a runtime matters in float32, and it costs
# -----------------------------------------------------
#
# Each setting alone. Those that move no bit of this model are in the CSV file.


products = torch.backends.cuda.matmul
ORT = {  # switch: where it acts, options of roundoff.ort.session
    "default": ("", {}),
    "graph optimisation off": ("", {"optimization": "none"}),
    "use_deterministic_compute": ("", {"session_options": {"use_deterministic_compute": True}}),
    "session.set_denormal_as_zero": (
        "CPU",
        {"session_options": {"session.set_denormal_as_zero": "1"}},
    ),
    "one thread": ("CPU", {"threads": 1}),
    "use_tf32 = 0": ("CUDA float32", {"tf32": False}),
    "enable_skip_layer_norm_strict_mode": (
        "CUDA float16",
        {"provider_options": {"enable_skip_layer_norm_strict_mode": 1}},
    ),
}
TORCH = {  # switch: where it acts, how it is set and read, the value
    "default": ("", lambda v: None, lambda: None, None),
    "use_deterministic_algorithms": (
        "CPU",
        torch.use_deterministic_algorithms,
        torch.are_deterministic_algorithms_enabled,
        True,
    ),
    "one thread": ("CPU", torch.set_num_threads, torch.get_num_threads, 1),
    "set_flush_denormal": ("CPU", torch.set_flush_denormal, lambda: False, True),
    "set_float32_matmul_precision = high": (
        "CUDA float32",
        torch.set_float32_matmul_precision,
        torch.get_float32_matmul_precision,
        "high",
    ),
    "allow_fp16_accumulation": (
        "CUDA float16",
        partial(setattr, products, "allow_fp16_accumulation"),
        partial(getattr, products, "allow_fp16_accumulation"),
        True,
    ),
    "allow_fp16_reduced_precision_reduction = False": (
        "CUDA float16",
        partial(setattr, products, "allow_fp16_reduced_precision_reduction"),
        partial(getattr, products, "allow_fp16_reduced_precision_reduction"),
        False,
    ),
    "allow_bf16_reduced_precision_reduction = False": (
        "CUDA bfloat16",
        partial(setattr, products, "allow_bf16_reduced_precision_reduction"),
        partial(getattr, products, "allow_bf16_reduced_precision_reduction"),
        False,
    ),
}


def with_switch(evaluator, feeds, put, get, value):
    """torch's run, with a switch set for its time."""
    before = get()
    put(value)
    z = evaluator.run(None, feeds)[0]
    put(before)
    return z


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
    medians = measure(
        {": ".join(key): call for key, call in calls.items()},
        warmup=1,
        min_rounds=5,
        budget_s=0.05 if unit_test_going() else 2.0,
        device="cuda" if case.provider == CUDA else "cpu",
    ).frame.set_index("label")["median"]
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
        switches.append(
            case.columns
            | {
                "runtime": runtime,
                "switch": switch,
                "moved": moved,
                "abs": apart["abs"],
                "share": apart["rep"][">0.0"] / apart["n"],
                "rms error": error.rms,
                "mean error": error.mean,
                "cost": cost,
            }
        )
study.table(
    "switches",
    switches,
    "Each switch alone, where it moves a result: distance from the other runtime's default, "
    "typical error, time over its own default.",
    columns=["switch", "case", "abs", "rms error", "cost"],
    rows={"moved": lambda s: s > 0},
    times=["cost"],
)

# %%

study.claim(
    "For this model and size `use_tf32=0` takes about {4} times ONNX Runtime's default time, and "
    "`set_float32_matmul_precision('high')` about {0.27} of torch's; a second run agrees within "
    "10 %.",
    name="cost",
    of="switches",
    where={"switch": ["use_tf32 = 0", "set_float32_matmul_precision = high"]},
    timed=True,
    on="nvidia-h200",
    value=lambda t: t["cost"].tolist(),
    test=lambda t: abs(t["cost, second run"] / t["cost"] - 1) < 0.1,
)

# %%

study.claim(
    "No other switch moves a bit in float32: not graph optimisation, determinism or threads. "
    "This model has little to fuse and no denormals, so it says little of them elsewhere.",
    of="switches",
    where={
        "dtype": "float32",
        "switch": lambda s: (
            ~s.isin(["default", "use_tf32 = 0", "set_float32_matmul_precision = high"])
        ),
    },
    test=lambda t: t["moved"] == 0,
)

# %%

study.claim(
    "Accumulating in float16 makes the typical error {3.0} times as large in torch "
    "(`allow_fp16_accumulation`) and {3.0} times in ONNX Runtime (`ORT_CUDA_GEMM_OPTIONS=1`).",
    of="switches",
    where={
        "provider": "CUDA",
        "dtype": "float16",
        "switch": ["default", "allow_fp16_accumulation", "ORT_CUDA_GEMM_OPTIONS = 1: float16 sums"],
    },
    on="nvidia-h200",
    value=lambda t: t.groupby("runtime")["rms error"].agg(lambda e: e.max() / e.iloc[0]).tolist(),
)

# %%
# In float16, look for overflow before rounding
# ---------------------------------------------
#
# RMSNorm squares its input, and in float16 nothing above 255.9 has a square. Deep transformers have
# such channels [#massive]_; here there is one, in one of two sequences. The mean becomes infinite,
# a number over it 0, and a look for NaN at the end of the model finds nothing. The walk does:

generator = torch.Generator().manual_seed(1)
x, residual = (torch.rand(2, 32, 64, generator=generator) * 4 - 2 for _ in range(2))
residual[1, :, 7] *= 400
large = {"X": x.half(), "residual": residual.half(), "scale": torch.ones(64).half()}
half, single = (
    Runner(
        dtype_info(i).name,
        TorchOnnxEvaluator(residual_rms_norm(i)),
        dtype=onnx_dtype_to_torch_dtype(i),
    )
    for i in (FLOAT16, FLOAT32)
)
print("first infinite result:", localize(half, single, large).first_non_finite()["outputs"])

remedies = []
for name, wide in (("as written", False), ("squares in float32", True)):
    model = residual_rms_norm(FLOAT16, wide=wide)
    exact = TorchOnnxEvaluator(model, truth=True).run(None, large)[0]
    for provider in providers:
        results = {
            "torch": TorchOnnxEvaluator(model, [provider]).run(None, large)[0],
            "ORT": session(model, [provider]).run(large)[0],
        }
        for runtime, z in results.items():
            zeros, short = (z == 0).all(dim=-1), provider.removesuffix("ExecutionProvider")
            counts = {"rows of zeros": int(zeros.sum()), "rows": zeros.numel()}
            row = {"model": name, "runtime": runtime, "provider": short} | counts
            remedies.append(row | {"error": scaled_error(exact, z.cpu()).largest})
study.table(
    "remedies",
    remedies,
    "RMSNorm in float16, one channel uniform in ±800: rows of the output that are all zeros.",
    columns=["model", "runtime", "provider", "rows of zeros", "error"],
    rows={"model": "as written"},
)

# %%

study.claim(
    "As written, {21} of 64 rows come out as zeros on a GPU, from both runtimes.",
    of="remedies",
    where={"model": "as written", "provider": "CUDA"},
    on="nvidia-h200",
    value=lambda t: t["rows of zeros"],
)

# %%

study.claim(
    "With the squares in float32 no row is lost, nor by ONNX Runtime's CPU provider, which "
    "computes in float32 by itself.",
    of="remedies",
    anywhere=True,
    test=lambda t: (
        t["rows of zeros"][
            (t["model"] != "as written") | ((t["runtime"] == "ORT") & (t["provider"] == "CPU"))
        ]
        == 0
    ),
)

# %%
# A tolerance that holds, for weights of both signs too
# -----------------------------------------------------
#
# :func:`roundoff.compare.tolerance` bounds what rounding does in the product and the addition,
# element by element, relative to the sum of the magnitudes of its terms, :math:`|x||w| + |b|`,
# since with weights of both signs Z can cancel to nearly nothing. On a CPU, and in float32 without
# TF32, rounding is to nearest: with independent errors of mean zero the bound holds with
# probability 1 − 10⁻⁹ for the whole tensor. Equal terms break it: their errors have one sign.
# Tensor cores truncate: the bound is :math:`2nu` for n terms, and always holds where they keep 24
# bits. LayerNormalization's own error is not in it: :func:`roundoff.compare.layer_norm_bound` has
# it.

limits = []
for weights in ("uniform", "normal"):
    for case in usable:
        feeds = case.feeds(weights)
        normed, exact = case.evaluator(truth=True).run(["normed", "Z"], feeds)
        size = normed.abs() @ feeds["weights"].double().abs() + feeds["bias2"].double()
        results = case.torch(feeds), case.ort(feeds)
        cores = case.provider == CUDA and (case.itype != FLOAT32 or any(case.uses_tf32))
        kinds = {"confidence": 1 - 1e-9, "elements": exact.numel()}, {"rounding": "truncation"}
        name, eps = dtype_info(case.itype).name, dtype_info(case.itype).eps
        operands = "tf32" if any(case.uses_tf32) else name
        limit, without = (
            tolerance(name, args.width, "float32", operands=o, **kinds[k]) + eps / 2
            for o, k in ((operands, cores), (name, cores and case.itype != FLOAT32))
        )
        rtol, atol = {FLOAT32: (1.3e-6, 1e-5), FLOAT16: (1e-3, 1e-5), BFLOAT16: (1.6e-2, 1e-5)}[
            case.itype
        ]  # of torch.testing
        far = (results[0] - results[1]).abs() > atol + rtol * results[1].abs()
        limits.append(
            case.columns
            | {
                "weights": weights,
                "tolerance": 2 * limit,
                "used": tolerance_used(*results, size, limit),
                "used without TF32": tolerance_used(*results, size, without),
                "torch used": 2 * tolerance_used(exact, results[0], size, limit),
                "ORT used": 2 * tolerance_used(exact, results[1], size, limit),
                "condition": float((size / exact.abs()).max()),
                "assert_close": float(far.float().mean()),
            }
        )
study.table(
    "limits",
    limits,
    "Weights of both signs: the tolerance, the share of the bound that each error uses, and the "
    "share of elements that torch.testing.assert_close refuses with its defaults.",
    columns=["case", "tolerance", "torch used", "ORT used", "assert_close"],
    rows={"weights": "normal", "tf32": ["", "ORT alone", "neither"]},
)

# %%

study.claim(
    "Each runtime's error keeps within the bound, using up to {0.37} of it, and their difference "
    "within twice the bound, with weights of one sign and of both.",
    of="limits",
    on="nvidia-h200",
    value=lambda t: t[["torch used", "ORT used"]].max(axis=1),
    test=lambda t: t[["torch used", "ORT used", "used"]].max(axis=1) <= 1,
    anywhere=True,
)

# %%

study.claim(
    "TF32 on one side exceeds the tolerance without TF32, by at least {1.7} times.",
    of="limits",
    where={"tf32": ["ORT alone", "torch alone"]},
    on="nvidia-h200",
    value=lambda t: t["used without TF32"],
    test=lambda t: t["used without TF32"] > 1,
)

# %%

study.claim(
    "`assert_close` refuses {5.7} % of the float16 elements on a CPU with weights of both "
    "signs, all of them within the tolerance.",
    of="limits",
    on="nvidia-h200",
    where={"case": "CPU float16", "weights": "normal"},
    value=lambda t: 100 * t["assert_close"],
    test=lambda t: t["used"] < 1,
)

# %%

study.claim(
    "A tolerance relative to Z would say nothing there: the condition number reaches up to "
    "{2.0e9}.",
    of="limits",
    where={"weights": "normal"},
    on="nvidia-h200",
    value=lambda t: t["condition"],
)

# %%
# .. _your-own-model:
#
# Your own model
# --------------
#
# Put in an ONNX file, and the module it was exported from, if there is one: which node differs,
# who is nearer the truth, and what to set (:func:`roundoff.runtimes.compare_runtimes`). Its
# ``rtol`` and ``atol`` are calibrated on many feeds of the same kind: at most one fresh feed in 300
# exceeds them, and ``passes`` says which faults they cannot see. A difference far above them is no
# rounding: look at ``module.eval()``, the feeds, the weights and the export.

MODEL = layer_norm_matmul()  # or "model.onnx"
FEEDS = layer_norm_feeds(args.rows, args.width)  # or None: random ones
MODULE = None  # or the torch module
compare_runtimes(MODEL, FEEDS, module=MODULE)

# %%
# Limits, and what to read next
# -----------------------------
#
# * Two Hopper GPUs, one kind of processor, one model and size. TF32 needs an A100 or later.
#   ``use_deterministic_algorithms`` on CUDA needs ``CUBLAS_WORKSPACE_CONFIG`` and was measured on
#   the CPU alone.
# * The study that posed the question [#published]_ gives 0.0196 for float32 on CUDA and 0.0188
#   for a swapped product "on the CPU": both have the size of TF32 on one side.
# * Next: :ref:`reduction-order`, for why two kernels round apart at all, and :ref:`llama-backend`,
#   for what a faster kernel may change.
#
# .. [#fasi] M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, *Numerical behavior of NVIDIA tensor
#    cores*, PeerJ Computer Science 7, 2021, :doi:`10.7717/peerj-cs.330`.
# .. [#models] F. A. Khattak, M. Mikaitis, *Accurate models of NVIDIA tensor cores*, 2025,
#    :arxiv:`2512.07004`.
# .. [#massive] M. Sun, X. Chen, J. Z. Kolter, Z. Liu, *Massive activations in large language
#    models*, 2024, :arxiv:`2402.17762`.
# .. [#published] X. Dupré, `LayerNormalization implementation cannot be exchanged
#    <https://sdpython.github.io/doc/onnx-diagnostic/dev/auto_technical/
#    plot_layer_norm_discrepancies.html>`_, documentation of onnx-diagnostic.

study.finish()
