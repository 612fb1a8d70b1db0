"""The study behind "Why PyTorch and ONNX Runtime give different results".

A LayerNormalization, a product and an addition, run by torch's kernels and by ONNX Runtime, in
three types and with TF32 on either side: how far apart the two are, how far from float64, which
node differs, which switch moves a bit and what the switch costs.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/layer_norm_discrepancies.py --record
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from roundoff.compare import max_diff, scaled_error, tolerance, tolerance_used
from roundoff.dtypes import dtype_info, onnx_dtype_to_torch_dtype, ulp
from roundoff.errors import UnsupportedError
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.models import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from roundoff.ort import available, run_apart, session
from roundoff.page.measurement import Study
from roundoff.reductions import tensor_core_matmul
from roundoff.script import unit_test_going
from roundoff.timing import measure, torch_precision

study = Study(
    "plot_layer_norm_discrepancies",
    "LayerNormalization and a product in torch and in ONNX Runtime: differences, errors, switches.",
    on="nvidia-h200",
    width=(64 if unit_test_going() else 1152, "inner size", 1),
    rows=(1024, "rows of X in a batch item", 1),
)
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FLOAT32, FLOAT16, BFLOAT16 = 1, 10, 16
GPU = torch.cuda.is_available()
PROVIDERS = available([CPU, CUDA] if GPU else [CPU])

# A case is a device, a type and, for float32 on a GPU, who may multiply in TF32: ONNX Runtime
# alone (what both do when nothing is set), both, neither, or torch alone.
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

    def feeds(self, args, weights="uniform"):
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


CASES = [Case(p, t) for p in PROVIDERS for t in (FLOAT32, FLOAT16, BFLOAT16) if (p, t) != (CUDA, 1)]
CASES += [Case(CUDA, FLOAT32, tf32) for tf32 in TF32 if CUDA in PROVIDERS]


def usable() -> list[Case]:
    """The cases that ONNX Runtime has kernels for; none in bfloat16 on a processor."""
    return [case for case in CASES if (case.provider, case.itype) != (CPU, BFLOAT16)]


def plain() -> list[Case]:
    """Those in which torch multiplies in float32, as it does when nothing is set."""
    return [case for case in usable() if not case.uses_tf32[1]]


# --- How far apart, and how far from float64. ----------------------------------------------------


def gap(case: Case, args: Any) -> dict[str, Any]:
    """Z of torch against Z of ONNX Runtime, and the error of each against float64."""
    feeds = case.feeds(args)
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    results = {"torch": case.torch(feeds)}
    try:
        results["ORT"] = case.ort(feeds)
        apart = max_diff(results["ORT"], results["torch"])
        step = float(ulp(apart["got"], case.itype))
        row = {"abs": apart["abs"], "ulp there": apart["abs"] / step}
    except UnsupportedError:
        row = {"status": "ONNX Runtime has no such kernel"}
    for runtime, z in results.items():
        error = scaled_error(truth, z)
        row |= {f"{runtime} error": error.rms, f"{runtime} mean": error.mean}
    return case.columns | row


@study.table(part="provider")
def gaps(args):
    """Every case: the difference of the two runtimes, and the error of each."""
    return [gap(case, args) for case in CASES]


# --- Which operator, which node. -----------------------------------------------------------------


@study.table(part="provider")
def blame(args):
    """How far Z moves when one operator of torch's run becomes ONNX Runtime's."""
    rows = []
    for case in plain():
        feeds = case.feeds(args)
        pures = {"torch": case.torch(feeds), "ORT": case.ort(feeds)}
        for op, kernel in (("LayerNormalization", LayerNormalizationOrt), ("MatMul", MatMulOrt)):
            swapped = case.evaluator(custom_kernels={("", op): kernel})
            z = swapped.run(None, feeds)[0]
            far = {f"from {side}": max_diff(pure, z)["abs"] for side, pure in pures.items()}
            rows.append(case.columns | {"swapped": op} | far)
    return rows


# --- TF32's error: operands of 11 bits, and sums that are cut. -----------------------------------


def tf32(x: torch.Tensor, add: int = 0x1000) -> torch.Tensor:
    """float32 rounded to the 11 bits of TF32; cut where nothing is added."""
    return ((x.view(torch.int32) + add) & ~0x1FFF).view(torch.float32)


@study.table(part="provider")
def signs(args):
    """Mean and typical error of the product with operands in TF32, simulated and measured."""
    feeds = Case(CPU, FLOAT32).feeds(args)
    x, w = Case(CPU, FLOAT32).evaluator().run(["normed"], feeds)[0], feeds["weights"]
    few = tf32(x)[0, :32], tf32(w)[:, :64].contiguous()  # the simulation is slow
    exact, small = x.double() @ w.double(), few[0].double() @ few[1].double()
    simulated = {
        "operands rounded to TF32": (exact, tf32(x).double() @ tf32(w).double()),
        "operands cut to TF32": (exact, tf32(x, 0).double() @ tf32(w, 0).double()),
        "sum cut as an H100 does": (small, tensor_core_matmul(*few, block=8, bits=26)),
    }
    rows = []
    for name, (truth, z) in simulated.items():
        e = scaled_error(truth, z, "float32")
        sizes = {"mean error": e.mean, "rms error": e.rms}
        rows.append({"what": f"simulated: {name}", "provider": "CPU"} | sizes)
    if CUDA in PROVIDERS:
        of = gap(Case(CUDA, FLOAT32, "both"), args)
        sizes = {"mean error": of["ORT mean"], "rms error": of["ORT error"]}
        rows.append({"what": "measured: ORT, TF32 on", "provider": "CUDA"} | sizes)
    return rows


# --- Switches: which moves a bit, and what it costs. ---------------------------------------------

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
        {"providers": [(CUDA, {"enable_skip_layer_norm_strict_mode": 1})]},
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


def with_switch(evaluator: TorchOnnxEvaluator, feeds: Any, put: Any, get: Any, value: Any) -> Any:
    """torch's run, with a switch set for its time."""
    before = get()
    put(value)
    z = evaluator.run(None, feeds)[0]
    put(before)
    return z


def switched(case: Case, feeds: Any) -> Iterator[tuple[str, str, Any, float]]:
    """Runtime, switch, result, and time over that of the runtime's default."""
    model, provider = layer_norm_matmul(case.itype), case.columns["provider"]
    calls, here = {}, ("", provider, f"{provider} {case.columns['dtype']}")
    for switch, (where, options) in ORT.items():
        if where in here:
            made = session(model, **{"providers": [case.provider], "tf32": True} | options)
            bound = made.bind(feeds)
            calls["ORT", switch] = lambda bound=bound: bound.run()[0]
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
        cost = medians.get(f"{runtime}: {switch}", float("nan")) / medians[f"{runtime}: default"]
        yield runtime, switch, z, cost


@study.table(part="provider", times=["cost"])
def switches(args):
    """Each switch alone: the share of the results that it moves, and time."""
    rows = []
    for case in plain():
        if case.tf32 == "neither":
            continue
        found = list(switched(case, case.feeds(args)))
        default = {runtime: z for runtime, switch, z, _ in found if switch == "default"}
        for runtime, switch, z, cost in found:
            own = default[runtime]
            rows.append(
                case.columns
                | {
                    "runtime": runtime,
                    "switch": switch,
                    "moved": float("nan") if z is own else float((z != own).float().mean()),
                    "cost": cost,
                }
            )
    return rows


# --- float16 overflows in a square before it rounds. ---------------------------------------------


@study.table(part="provider")
def remedies(args):
    """RMSNorm in float16: rows of the output that are all zeros.

    Of the 64 rows, the 32 of the second batch item have a channel uniform in ±800.
    """
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.rand(2, 32, 64, generator=generator) * 4 - 2 for _ in range(2))
    residual[1, :, 7] *= 400
    large = {"X": x.half(), "residual": residual.half(), "scale": torch.ones(64).half()}
    rows = []
    for name, wide in (("as written", False), ("squares in float32", True)):
        model = residual_rms_norm(FLOAT16, wide=wide)
        for provider in PROVIDERS:
            results = {
                "torch": TorchOnnxEvaluator(model, [provider]).run(None, large)[0],
                "ORT": session(model, [provider]).run(large)[0],
            }
            for runtime, z in results.items():
                zeros, short = (z == 0).all(dim=-1), provider.removesuffix("ExecutionProvider")
                counts = {"rows of zeros": int(zeros.sum()), "rows": zeros.numel()}
                rows.append({"model": name, "runtime": runtime, "provider": short} | counts)
    return rows


# --- A bound for the error, and how much of it each runtime uses. --------------------------------


def bound(case: Case, weights: str, args: Any) -> dict[str, Any]:
    """One case: the share of the tolerance that each error uses."""
    feeds = case.feeds(args, weights)
    normed, exact = case.evaluator(truth=True).run(["normed", "Z"], feeds)
    size = normed.abs() @ feeds["weights"].double().abs() + feeds["bias2"].double()
    results = case.torch(feeds), case.ort(feeds)
    cores = case.provider == CUDA and (case.itype != FLOAT32 or any(case.uses_tf32))
    kinds = {"confidence": 1 - 1e-9, "elements": exact.numel()}, {"rounding": "truncation"}
    name, eps = dtype_info(case.itype).name, dtype_info(case.itype).eps
    operands = "tf32" if any(case.uses_tf32) else name
    limit = tolerance(name, args.width, "float32", operands=operands, **kinds[cores]) + eps / 2
    return {
        "weights": weights,
        "torch used": 2 * tolerance_used(exact, results[0], size, limit),
        "ORT used": 2 * tolerance_used(exact, results[1], size, limit),
    }


@study.table(part="provider")
def limits(args):
    """Weights of one sign and of both: the share of the tolerance that each error uses."""
    return [
        case.columns | bound(case, weights, args)
        for weights in ("uniform", "normal")
        for case in usable()
    ]


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def at(rows: Any, tf32: str, column: str = "abs") -> float:
    """A column of the case with TF32 on these sides."""
    return float(rows.set_index("tf32")[column][tf32])


Z = "Z of torch and of ONNX Runtime, float32"
SIDES = {"tf32": ["ORT alone", "both", "neither"]}

study.value(
    "gap.default",
    f"largest difference of {Z}, TF32 in ONNX Runtime alone",
    "gaps",
    lambda t: at(t, "ORT alone"),
    where=SIDES,
    test=lambda v: v.value > 100 * at(v.rows, "neither"),
)
study.value(
    "gap.off",
    f"largest difference of {Z}, TF32 in neither",
    "gaps",
    lambda t: at(t, "neither"),
    where=SIDES,
    test=lambda v: 0 < v.value < at(v.rows, "ORT alone") / 100,
)
study.value(
    "gap.both",
    f"largest difference of {Z}, TF32 in both",
    "gaps",
    lambda t: at(t, "both"),
    where=SIDES,
    # close to each other, and both as far from float64 as ONNX Runtime is by default
    test=lambda v: (
        v.value < at(v.rows, "ORT alone") / 10
        and abs(at(v.rows, "both", "torch error") / at(v.rows, "both", "ORT error") - 1) < 0.01
        and at(v.rows, "both", "ORT error") == at(v.rows, "ORT alone", "ORT error")
    ),
)
study.value(
    "error.cpu",
    f"typical error of torch over that of ONNX Runtime on a processor, {Z}",
    "gaps",
    lambda t: t["torch error"] / t["ORT error"],
    where={"case": "CPU float32"},
    test=lambda v: v.value > 1,
)
study.value(
    "half.ulp",
    "largest difference in units in the last place, float16 and bfloat16 on a GPU",
    "gaps",
    lambda t: t["ulp there"].max(),
    where={"provider": "CUDA", "dtype": ["float16", "bfloat16"]},
    test=lambda v: v.value == 1,
)
for name, op in (("swap.norm", "LayerNormalization"), ("swap.product", "MatMul")):
    study.value(
        name,
        f"how far Z moves when {op} is ONNX Runtime's, float32, TF32 in ONNX Runtime alone",
        "blame",
        lambda t, op=op: t.set_index("swapped")["from torch"][op],
        where={"tf32": "ORT alone"},
        test=lambda v: (
            v.rows.set_index("swapped")["from torch"]["MatMul"]
            > 100 * v.rows.set_index("swapped")["from torch"]["LayerNormalization"]
        ),
    )
study.value(
    "swap.norm.tf32",
    "how far ONNX Runtime's Z moves when LayerNormalization is torch's, float32, MatMul in TF32",
    "blame",
    "from ORT",
    where={"tf32": "ORT alone", "swapped": "MatMul"},
    test=lambda v: 0.001 < v.value < 0.005,
)
study.value(
    "swap.off",
    "how far Z moves when MatMul is ONNX Runtime's, float32, TF32 in neither",
    "blame",
    "from torch",
    where={"tf32": "neither", "swapped": "MatMul"},
    test=lambda v: v.value == 0,
)
MEASURED, PARTS = "measured: ORT, TF32 on", ["operands rounded to TF32", "sum cut as an H100 does"]
PARTS = [f"simulated: {part}" for part in PARTS]


def is_explained(found):
    """Whether rounded operands and cut sums give the measured error, mean and typical one."""
    rows = found.rows.set_index("what")
    together = (rows["rms error"][PARTS] ** 2).sum() ** 0.5
    mean = rows["mean error"][PARTS].sum()
    return (
        abs(rows["rms error"][MEASURED] / together - 1) < 0.02
        and abs(rows["mean error"][MEASURED] / mean - 1) < 0.05
    )


for name, column in (("measured.mean", "mean error"), ("measured.rms", "rms error")):
    study.value(
        name,
        f"{column} of ONNX Runtime's Z in TF32, ε × RMS of the truth",
        "signs",
        lambda t, column=column: t.set_index("what")[column][MEASURED],
        where={"what": [MEASURED, *PARTS]},
        test=is_explained,
    )
SIMULATED = "of the product in TF32, simulated, ε × RMS of the truth"
for name, column, part, what in (
    ("rounded.rms", "rms error", PARTS[0], "rounded operands"),
    ("dropped.rms", "rms error", PARTS[1], "dropped bits"),
    ("cut.mean", "mean error", "simulated: operands cut to TF32", "operands that are cut"),
):
    study.value(
        name,
        f"{column}, {what} {SIMULATED}",
        "signs",
        lambda t, column=column, part=part: t.set_index("what")[column][part],
        where={"what": [part], "provider": "CPU"},
        # rounding scatters, dropping shifts, and cutting is far from what is measured
        test={
            "rounded.rms": lambda v: v.value > 100 * abs(v.rows["mean error"].iloc[0]),
            "dropped.rms": lambda v: v.value < -1.01 * v.rows["mean error"].iloc[0],
            "cut.mean": lambda v: v.value < -1000,
        }[name],
    )
for name, words, dropped, most in (
    ("both.mean", "dropped bits", PARTS[1], -40),
    ("older.mean", "bits dropped as an A100 does", "simulated: sum cut as an A100 does", -70),
):
    study.value(
        name,
        f"mean error, rounded operands and {words} {SIMULATED}",
        "signs",
        lambda t: t["mean error"].sum(),
        where={"what": [PARTS[0], dropped], "provider": "CPU"},
        test=lambda v, most=most: v.value < most,
    )
for name, weights, signs, least, most in (
    ("positive", "uniform", "positive weights", 20, 60),
    ("signed", "normal", "weights of both signs", 100, 300),
):
    study.value(
        f"{name}.ratio",
        "largest error over the sum of the terms' magnitudes, of ONNX Runtime in TF32 over that of "
        f"torch in float32, {signs}",
        "limits",
        lambda t: t["ORT used"] / t["torch used"],
        where={"tf32": "ORT alone", "weights": weights},
        test=lambda v, least=least, most=most: least < v.value < most,
    )
for name, what, column, power, least, most in (
    ("signed.tf32", "ONNX Runtime in TF32", "ORT used", 1, 0.8, 1.3),
    ("signed.float32", "torch in float32", "torch used", -1, 3, 10),
):
    first, second = ("both signs", "positive ones")[::power]
    study.value(
        name,
        f"largest error over the sum of the terms' magnitudes, of {what}, weights: {first} over "
        f"{second}",
        "limits",
        lambda t, column=column, power=power: (
            (t.set_index("weights")[column]["normal"] / t.set_index("weights")[column]["uniform"])
            ** power
        ),
        where={"tf32": "ORT alone"},
        test=lambda v, least=least, most=most: least < v.value < most,
    )
study.value(
    "cost.off",
    "time of ONNX Runtime with use_tf32=0 over its default",
    "switches",
    "cost",
    where={"switch": "use_tf32 = 0"},
    test=lambda v: v.value > 2,
)
study.value(
    "cost.high",
    "time of torch with set_float32_matmul_precision('high') over its default",
    "switches",
    "cost",
    where={"switch": "set_float32_matmul_precision = high"},
    test=lambda v: v.value < 0.5,
)
study.value(
    "other.switches",
    "results of float32 that another switch than TF32's moves",
    "switches",
    lambda t: t["moved"].max(),
    where={
        "dtype": "float32",
        "switch": lambda s: (
            ~s.isin(["default", "use_tf32 = 0", "set_float32_matmul_precision = high"])
        ),
    },
    test=lambda v: v.value == 0,
)
study.value(
    "overflow.rows",
    "rows of zeros, of 32 with a channel uniform in ±800, RMSNorm in float16 on a GPU",
    "remedies",
    lambda t: t["rows of zeros"].unique(),
    where={"model": "as written", "provider": "CUDA"},
    test=lambda v: v.value > 0,
)

if __name__ == "__main__":
    study.main()
