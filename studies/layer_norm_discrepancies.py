"""The study behind "Why PyTorch and ONNX Runtime give different results".

A LayerNormalization, a product and an addition, run by torch's kernels and by ONNX Runtime, in
three types and with TF32 on either side: how far apart the two are, how far from float64, which
node differs, which switch moves a bit and what the switch costs.

The page tells the story with small experiments. This file measures the full grid, writes the
record, and defines each number that the page may print.

    python studies/layer_norm_discrepancies.py --record
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from roundoff.compare import max_diff, scaled_error
from roundoff.dtypes import ulp
from roundoff.evaluator import LayerNormalizationOrt, MatMulOrt, TorchOnnxEvaluator
from roundoff.models import layer_norm_feeds, layer_norm_matmul, residual_rms_norm
from roundoff.ort import available, session
from roundoff.page.measurement import Study
from roundoff.reductions import tensor_core_matmul
from roundoff.script import unit_test_going
from roundoff.timing import measure, torch_precision

study = Study(
    "plot_layer_norm_discrepancies",
    "LayerNormalization and a product in torch and in ONNX Runtime: differences, errors, switches.",
    on="nvidia-h200",
    part="provider",
)
WIDTH = 64 if unit_test_going() else 1152
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
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
    """One of the grid, and its two runs."""

    provider: str
    dtype: torch.dtype
    tf32: str = ""

    @property
    def columns(self):
        short, dtype = self.provider.removesuffix("ExecutionProvider"), str(self.dtype)[6:]
        case = f"{short.replace('CUDA', 'GPU')} {dtype}"
        if self.tf32:
            case += f", TF32 in {self.tf32}"
        return {"case": case, "provider": short, "dtype": dtype, "tf32": self.tf32}

    @property
    def uses_tf32(self):
        return TF32.get(self.tf32, (False, False))

    def feeds(self, weights="uniform"):
        device, batch = ("cuda", 32) if self.provider == CUDA else ("cpu", 2)
        feeds = layer_norm_feeds(1024, WIDTH, batch=batch, weights=weights)
        return {name: value.to(self.dtype).to(device) for name, value in feeds.items()}

    def evaluator(self, **options):
        provider = self.provider, {"use_tf32": int(self.uses_tf32[0])}
        return TorchOnnxEvaluator(
            layer_norm_matmul(self.dtype), [CPU if self.provider == CPU else provider], **options
        )

    def torch(self, feeds):
        with torch_precision(self.uses_tf32[1]):
            return self.evaluator().run(None, feeds)[0]

    def ort(self, feeds):
        model, tf32 = layer_norm_matmul(self.dtype), self.uses_tf32[0]
        return session(model, [self.provider], tf32=tf32).run(feeds)[0]


CASES = [Case(CPU, FLOAT32)]
if CUDA in PROVIDERS:
    CASES += [Case(CUDA, FLOAT16), Case(CUDA, BFLOAT16)]
    CASES += [Case(CUDA, FLOAT32, tf32) for tf32 in TF32]


# --- How far apart, and how far from float64. ----------------------------------------------------


def gap(case):
    """Z of torch against Z of ONNX Runtime, and the error of each against float64."""
    feeds = case.feeds()
    truth = case.evaluator(truth=True).run(None, feeds)[0]
    results = {"torch": case.torch(feeds), "ORT": case.ort(feeds)}
    apart = max_diff(results["ORT"], results["torch"])
    step = float(ulp(apart["got"], case.dtype))
    row = {"abs": apart["abs"], "ulp there": apart["abs"] / step}
    for runtime, z in results.items():
        error = scaled_error(truth, z)
        row |= {f"{runtime} error": error.rms, f"{runtime} mean": error.mean}
    return case.columns | row


@study.table()
def gaps(args):
    """Every case: the difference of the two runtimes, and the error of each."""
    return map(gap, CASES)


# --- Which operator, which node. -----------------------------------------------------------------


@study.table()
def blame(args):
    """How far Z moves when one operator of torch's run becomes ONNX Runtime's."""
    # torch multiplies in float32, as it does when nothing is set
    for case in [c for c in CASES if not c.uses_tf32[1]]:
        feeds = case.feeds()
        pures = {"torch": case.torch(feeds), "ORT": case.ort(feeds)}
        for op, kernel in (("LayerNormalization", LayerNormalizationOrt), ("MatMul", MatMulOrt)):
            swapped = case.evaluator(custom_kernels={("", op): kernel})
            z = swapped.run(None, feeds)[0]
            far = {f"from {side}": max_diff(pure, z)["abs"] for side, pure in pures.items()}
            yield case.columns | {"swapped": op} | far


# --- TF32's error: operands of 11 bits, and sums that are cut. -----------------------------------


def tf32(x, add=0x1000):
    """float32 rounded to the 11 bits of TF32; cut where nothing is added."""
    return ((x.view(torch.int32) + add) & ~0x1FFF).view(torch.float32)


@study.table()
def signs(args):
    """Mean and typical error of the product with operands in TF32, simulated and measured."""
    feeds = Case(CPU, FLOAT32).feeds()
    x, w = Case(CPU, FLOAT32).evaluator().run(["normed"], feeds)[0], feeds["weights"]
    few = tf32(x)[0, :32], tf32(w)[:, :64].contiguous()  # the simulation is slow
    exact, small = x.double() @ w.double(), few[0].double() @ few[1].double()
    simulated = {
        "operands rounded to TF32": (exact, tf32(x).double() @ tf32(w).double()),
        "operands cut to TF32": (exact, tf32(x, 0).double() @ tf32(w, 0).double()),
        "sum cut as an H100 does": (small, tensor_core_matmul(*few, block=8, bits=26)),
        "sum cut as an A100 does": (small, tensor_core_matmul(*few, block=4, bits=25)),
    }
    rows = []
    for name, (truth, z) in simulated.items():
        e = scaled_error(truth, z, "float32")
        sizes = {"mean error": e.mean, "rms error": e.rms}
        rows.append({"what": f"simulated: {name}", "provider": "CPU"} | sizes)
    if CUDA in PROVIDERS:
        of = gap(Case(CUDA, FLOAT32, "both"))
        sizes = {"mean error": of["ORT mean"], "rms error": of["ORT error"]}
        rows.append({"what": "measured: ORT, TF32 on", "provider": "CUDA"} | sizes)
    return rows


# --- Switches: which moves a bit of float32, and what it costs. ----------------------------------

ORT = {  # switch: options of roundoff.ort.session
    "default": {"tf32": True},
    "graph optimisation off": {"tf32": True, "optimization": "none"},
    "use_deterministic_compute": {
        "tf32": True,
        "session_options": {"use_deterministic_compute": True},
    },
    "use_tf32 = 0": {"tf32": False},
}
TORCH = {"default": False, "set_float32_matmul_precision = high": True}  # switch: TF32


@study.table(times=["cost"])
def switches(args):
    """Each switch alone, float32: the share of the results that it moves, and time."""
    for provider in PROVIDERS:
        case = Case(provider, FLOAT32, "ORT alone" * (provider == CUDA))
        feeds, model, calls = case.feeds(), layer_norm_matmul(FLOAT32), {}
        for switch, options in ORT.items():
            calls["ORT", switch] = session(model, [provider], **options).bind(feeds).run
        for switch, tf32 in TORCH.items():
            run = torch_precision(tf32)(case.evaluator().run)
            calls["torch", switch] = partial(run, None, feeds)
        results = {key: call()[0].clone() for key, call in calls.items()}
        found = measure(
            {": ".join(key): call for key, call in calls.items()},
            warmup=1,
            min_rounds=5,
            budget_s=0.05 if unit_test_going() else 2.0,
            device="cuda" if provider == CUDA else "cpu",
        )
        medians = found.frame.set_index("label")["median"]
        for (runtime, switch), z in results.items():
            moved = float((z != results[runtime, "default"]).float().mean())
            yield case.columns | {
                "runtime": runtime,
                "switch": switch,
                "moved": float("nan") if switch == "default" else moved,
                "cost": medians[f"{runtime}: {switch}"] / medians[f"{runtime}: default"],
            }


# --- float16 overflows in a square before it rounds. ---------------------------------------------


@study.table()
def remedies(args):
    """RMSNorm in float16: rows of the output that are all zeros.

    Of the 64 rows, the 32 of the second batch item have a channel uniform in ±800.
    """
    generator = torch.Generator().manual_seed(1)
    x, residual = (torch.rand(2, 32, 64, generator=generator) * 4 - 2 for _ in range(2))
    residual[1, :, 7] *= 400
    large = {"X": x.half(), "residual": residual.half(), "scale": torch.ones(64).half()}
    model = residual_rms_norm(FLOAT16)
    for provider in PROVIDERS:
        results = {
            "torch": TorchOnnxEvaluator(model, [provider]).run(None, large)[0],
            "ORT": session(model, [provider]).run(large)[0],
        }
        for runtime, z in results.items():
            yield {
                "model": "as written",
                "runtime": runtime,
                "provider": provider.removesuffix("ExecutionProvider"),
                "rows of zeros": int((z == 0).all(dim=-1).sum()),
            }


# --- Largest errors over the sum of the terms' magnitudes. ---------------------------------------


@study.table()
def limits(args):
    """Weights of one sign and of both, float32: the largest share of its terms that an error is."""
    case = Case(CUDA, FLOAT32, "ORT alone") if CUDA in PROVIDERS else Case(CPU, FLOAT32)
    for weights in "uniform", "normal":
        feeds = case.feeds(weights)
        normed, exact = case.evaluator(truth=True).run(["normed", "Z"], feeds)
        size = normed.abs() @ feeds["weights"].double().abs() + feeds["bias2"].double()
        used = {
            f"{of} used": float((z.double() - exact).abs().div(size).max())
            for of, z in {"torch": case.torch(feeds), "ORT": case.ort(feeds)}.items()
        }
        yield case.columns | {"weights": weights} | used


# --- Values: what pages may print. Name, datum and statistic, table, column; rows; a test. -------


def at(rows, tf32, column="abs"):
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
        test=lambda v: v.rows.set_index("swapped")["from torch"].pipe(
            lambda far: far["MatMul"] > 100 * far["LayerNormalization"]
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
# rounding scatters, dropping shifts, and cutting is far from what is measured
for name, column, part, what, holds in (
    (
        "rounded.rms",
        "rms error",
        PARTS[0],
        "rounded operands",
        lambda v: v.value > 100 * abs(v.rows["mean error"].item()),
    ),
    (
        "dropped.rms",
        "rms error",
        PARTS[1],
        "dropped bits",
        lambda v: v.value < -1.01 * v.rows["mean error"].item(),
    ),
    (
        "cut.mean",
        "mean error",
        "simulated: operands cut to TF32",
        "operands that are cut",
        lambda v: v.value < -1000,
    ),
):
    study.value(
        name,
        f"{column}, {what} {SIMULATED}",
        "signs",
        column,
        where={"what": part},
        test=holds,
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
        where={"what": [PARTS[0], dropped]},
        test=lambda v, most=most: v.value < most,
    )
OF_TERMS = "largest error over the sum of the terms' magnitudes, of"
for name, about, over, under, least, most in (
    (
        "positive.ratio",
        "ONNX Runtime in TF32 over that of torch in float32, positive weights",
        ("uniform", "ORT used"),
        ("uniform", "torch used"),
        20,
        60,
    ),
    (
        "signed.ratio",
        "ONNX Runtime in TF32 over that of torch in float32, weights of both signs",
        ("normal", "ORT used"),
        ("normal", "torch used"),
        100,
        300,
    ),
    (
        "signed.tf32",
        "ONNX Runtime in TF32, weights: both signs over positive ones",
        ("normal", "ORT used"),
        ("uniform", "ORT used"),
        0.8,
        1.3,
    ),
    (
        "signed.float32",
        "torch in float32, weights: positive ones over both signs",
        ("uniform", "torch used"),
        ("normal", "torch used"),
        3,
        10,
    ),
):
    study.value(
        name,
        f"{OF_TERMS} {about}",
        "limits",
        lambda t, over=over, under=under: t.set_index("weights").pipe(
            lambda used: used.at[over] / used.at[under]
        ),
        where={"tf32": "ORT alone", "weights": [over[0], under[0]]},
        test=lambda v, least=least, most=most: least < v.value < most,
    )
for name, about, switch, holds in (
    (
        "cost.off",
        "ONNX Runtime with use_tf32=0 over its default",
        "use_tf32 = 0",
        lambda v: v.value > 2,
    ),
    (
        "cost.high",
        "torch with set_float32_matmul_precision('high') over its default",
        "set_float32_matmul_precision = high",
        lambda v: v.value < 0.5,
    ),
):
    where = {"switch": switch, "provider": "CUDA"}
    study.value(name, f"time of {about}", "switches", "cost", where=where, test=holds)
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
