"""The lessons: right, and wrong in the way they say; the baselines: right."""

import contextlib
import dataclasses
import itertools
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch
import triton

from roundoff.errors import ArgumentError, ShapeError
from roundoff.kernels import baselines, interpreting, shuffled_programs
from roundoff.kernels._layer_norm import forward_of
from roundoff.kernels._runtime import multiprocessors
from roundoff.kernels.baselines import (
    decode_attentions,
    invariant_modes,
    invariant_products,
    layer_norms,
    rms_norms,
    vllm_tile,
)
from roundoff.kernels.invariant_matmul import tile_for
from roundoff.kernels.lessons import locked, plain_product, two_stage

DEVICE = "cpu" if interpreting() else "cuda"


def data(rows=37, columns=70, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator).to(dtype).to(DEVICE)
    dy = torch.randn(rows, columns, generator=generator).to(dtype).to(DEVICE)
    w = torch.rand(columns, generator=generator).to(dtype).to(DEVICE)
    mean, rstd = forward_of(x, None, None, 1e-5)[1]
    return dy, x, mean, rstd, w


def exact(dy, x, mean, rstd, w):
    x, dy, w = (t.double().requires_grad_() for t in (x, dy, w))
    b = torch.zeros_like(w, requires_grad=True)
    y = torch.nn.functional.layer_norm(x, w.shape, w, b)
    return torch.autograd.grad(y, (x, w, b), dy)


@pytest.mark.parametrize("programs", [1, 4, 100])
def test_two_stages_are_right(programs):
    given = data()
    for a, e in zip(two_stage(*given, programs=programs), exact(*given), strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5)


def test_the_lock_is_right_up_to_rounding_and_moves():
    *given, w = data(dtype=torch.float16)
    found = [locked(*given, groups=4)]
    torch.testing.assert_close(found[0].double(), exact(*given, w)[1], rtol=0, atol=0.1)
    if not interpreting():
        return
    steady = []
    for seed in range(4):
        with shuffled_programs(seed):
            found.append(locked(*given, groups=4))
            steady.append(two_stage(*given, w)[1])
    assert len({t.numpy().tobytes() for t in found}) > 1
    assert len({t.numpy().tobytes() for t in steady}) == 1


def test_a_row_is_one_block():
    x = torch.zeros(1, 20000, device=DEVICE)
    with pytest.raises(ArgumentError, match="at most 16384"):
        locked(x, x, x[:, 0], x[:, 0])


PLAIN_TILES = ((16, 16, 16), (32, 16, 32), (16, 64, 64), (64, 32, 32))


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 256, generator=generator).to(DEVICE, dtype) for _ in "xw"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_plain_product_is_right(dtype, splits):
    x, w = operands(dtype)
    y, instruction = plain_product(x, w, (16, 32, 64), splits=splits)
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=0, atol=1e-4)
    assert y.dtype == torch.float32
    assert (instruction == "numpy") == interpreting()


def test_the_tile_of_a_plain_product_does_not_matter_and_a_split_does(chains):
    x, w = operands()
    whole, *others = (plain_product(x, w, tile)[0] for tile in PLAIN_TILES)
    assert all(torch.equal(whole, other) for other in others)
    split, *others = (plain_product(x, w, tile, splits=4)[0] for tile in PLAIN_TILES)
    assert all(torch.equal(split, other) for other in others)
    assert not torch.equal(whole, split)


@pytest.mark.parametrize(
    ("tile", "splits"), [((48, 16, 16), 1), ((16, 48, 16), 1), ((16, 16, 64), 8)]
)
def test_a_plain_product_takes_whole_tiles(tile, splits):
    with pytest.raises(ShapeError, match="multiples of"):
        plain_product(*operands(), tile, splits=splits)


@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
def test_baselines_are_here_or_missing(device):
    norms, missing = layer_norms(device)
    assert "torch" in norms
    assert ("roundoff" in norms) == (interpreting() or device == "cuda")
    assert {"roundoff", "torch", "inductor", "Liger", "QuACK"} <= norms.keys() | missing.keys()


@pytest.mark.parametrize("columns", [1024, 3072, 4096, 6144, 12288, 15872, 16384, 24576])
def test_quack_gets_no_more_than_64_columns_a_thread(columns, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Config:
        num_threads: int
        threads_per_row: int
        cluster_n: int

        @classmethod
        def from_analytical_heuristic(cls, n, width, is_layernorm):
            limits = [(64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128)]
            threads = next((t for limit, t in limits if n <= limit), 256)
            return cls(128 if n <= 16384 else 256, threads, 1 if n <= 16384 else 2)

    configs = []

    def usual(x, w, b, eps, return_rstd, return_mean):
        configs.append(Config.from_analytical_heuristic(x.shape[1], 16, True))
        return x, None, None

    def launch(x, w, y, b, rstd, mean, *, eps, is_layernorm, config):
        assert is_layernorm
        configs.append(config)

    tuned = types.SimpleNamespace(fn=launch)
    module = types.SimpleNamespace(layernorm_fwd=usual, rmsnorm_fwd_tuned=tuned)
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", module)
    monkeypatch.setitem(
        sys.modules, "quack.rmsnorm_config", types.SimpleNamespace(RmsNormFwdConfig=Config)
    )
    baselines._quack().forward(torch.empty(2, columns, dtype=torch.float16), None, None, 1e-5)
    [config] = configs
    assert columns <= 64 * config.threads_per_row * config.cluster_n
    assert config.num_threads % config.threads_per_row == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", sorted({"cpu", DEVICE}))
def test_baselines_agree_with_float64(device, dtype):
    dy, x, _, _, w = (t.to(device) for t in data(dtype=dtype))
    truth = torch.nn.functional.layer_norm(x.double(), w.shape, w.double())
    eps = torch.finfo(dtype).eps
    # torch rounds each partial sum of a column to a type of 16 bits: at most rows * eps / 2.
    of_y, of_sums = (1e-5, 1e-5) if eps < 1e-6 else (2 * eps, len(x) * eps / 2)
    for label, norm in layer_norms(device)[0].items():
        weight = w.to(norm.weights or dtype)
        b = torch.zeros_like(weight)
        y, *saved = norm.forward(x, weight, b, 1e-5)
        results = norm.backward(dy, x, weight, b, *saved)
        expected = (truth, *exact(dy, x, None, None, w))
        for got, e, near in zip(
            (y, *results), expected, (of_y, of_y, of_sums, of_sums), strict=True
        ):
            torch.testing.assert_close(
                got.double(), e, rtol=of_y, atol=near, msg=lambda m, n=label: f"{n}: {m}"
            )


def test_inductor_leaves_the_cache_of_triton_where_it_is(monkeypatch):
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    place = triton.knobs.cache.dir
    assert triton_cache_dir(0) != place  # what inductor would set
    baselines._prepare_compiler()
    assert triton_cache_dir(0) == triton.knobs.cache.dir == place


def test_what_is_not_installed_is_missing_with_its_reason(monkeypatch):
    """Whatever this machine has, and whether or not something imported it before."""
    parts = "liger_kernel", "liger_kernel.ops", "liger_kernel.ops.layer_norm"
    for name in parts:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    there, missing = layer_norms("cuda")
    assert "Liger" in there
    assert "Liger" not in missing
    for name in parts:
        monkeypatch.setitem(sys.modules, name, None)
    there, missing = layer_norms("cuda")
    assert "Liger" not in there
    assert "liger_kernel" in missing["Liger"]


@pytest.mark.parametrize(("known", "label"), [
    (layer_norms, "QuACK"), (rms_norms, "QuACK"), (layer_norms, "Transformer Engine"),
    (invariant_products, "batch_invariant_ops"), (invariant_modes, "batch_invariant_ops"),
])  # fmt: skip
def test_what_raises_when_it_is_imported_is_missing_with_its_reason(
    known, label, tmp_path, monkeypatch
):
    for name in ("quack", "transformer_engine", "batch_invariant_ops"):
        for module in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        (tmp_path / f"{name}.py").write_text('raise RuntimeError("No CTK flavor installed")')
    monkeypatch.syspath_prepend(tmp_path)
    there, missing = known()
    assert label not in there
    assert "No CTK flavor installed" in missing[label]


@pytest.mark.parametrize("known", [invariant_products, invariant_modes])
def test_an_invariant_baseline_that_is_not_installed_is_missing_with_its_reason(known, monkeypatch):
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", None)
    there, missing = known()
    assert "batch_invariant_ops" not in there
    assert "batch_invariant_ops" in missing["batch_invariant_ops"]


def test_an_invariant_baseline_is_called_as_a_linear_layer(monkeypatch):
    other = types.ModuleType("batch_invariant_ops")
    other.matmul_persistent = torch.mm  # as theirs: (M, K) and (K, N)
    other.set_batch_invariant_mode = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", other)
    x, weight = (torch.randn(n, 5, generator=torch.Generator().manual_seed(n)) for n in (3, 4))
    product = invariant_products()[0]["batch_invariant_ops"]
    torch.testing.assert_close(product(x, weight), torch.nn.functional.linear(x, weight))
    with invariant_modes()[0]["batch_invariant_ops"]():
        pass


def test_without_triton_the_error_says_what_to_install():
    code = """
import sys
sys.modules["triton"] = None
from roundoff.errors import MissingDependencyError
try:
    import roundoff.kernels
except MissingDependencyError as error:
    print(error.hint)
"""
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source}
    )
    assert "pip install triton" in done.stdout, done.stderr


def test_a_tile_of_vllm_covers_its_rows_with_one_block_of_k():
    for n, k in ((12288, 2048), (2048, 6144)):
        tiles = [vllm_tile(m, n, k) for m in range(1, 4097)]
        assert {tile.depth for tile in tiles} == {128}
        assert all(t.rows >= m for m, t in enumerate(tiles[:32], 1) if m <= 16)
        assert len(set(tiles)) > 5
    assert len({vllm_tile(m, 4096, 4096) for m in (1, 100, 4096)}) == 1


def test_what_is_compiled_ahead_is_what_will_be_asked_for(monkeypatch):
    """Each tile that a product takes, once; attention of each size in each way; all of it."""
    asked = []

    class Here:
        def __init__(self, count, **options):
            self.count = count

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, items):
            assert len(items) == self.count
            return [function(item) for item in items]

    def multiply(x, weight, tile):
        asked.append((x.dtype, tile, weight.shape[1] % tile.depth == 0))

    def attend(q, k, v, way):
        asked.append((k.shape[2], len(q), way))
        if way == "broken":
            raise RuntimeError("not on this machine")

    ways = {way: partial(attend, way=way) for way in ("a", "broken")}
    monkeypatch.setattr(baselines, "Workers", Here)
    monkeypatch.setattr(baselines, "matmul", multiply)
    monkeypatch.setattr(baselines, "decode_attentions", lambda: ways)
    weights, counts, caches = [(576, 1536), (2048, 12288)], [1, 16, 64, 512], [(512, 1), (512, 8)]
    made = baselines.compile_ahead(weights, counts, caches)
    processors = multiprocessors(-1 if interpreting() else 0)
    tiles = {
        (dtype, tile, k % tile.depth == 0)
        for dtype in (torch.bfloat16, torch.float16)
        for k, n in weights
        for m in counts
        for tile in (tile_for(m, n, k, 2, processors), vllm_tile(m, n, k))
    }
    assert set(asked) == tiles | {(*sizes, way) for sizes in caches for way in ways}
    assert len(asked) == len(set(asked))
    assert made == {"compiled": len(asked) - 2, "of": len(asked)}


@pytest.mark.slow(reason="starts processes; what they do has a test of its own")
def test_processes_compile_ahead():
    assert baselines.compile_ahead([(32, 16)], [1, 2], [])["compiled"] > 0


class Planned:
    """Stands for FlashInfer's decode: reads pages of a cache as it is told to."""

    def __init__(self, room, layout, use_tensor_cores):
        assert (layout, use_tensor_cores) == ("HND", True)

    def plan(self, indptr, indices, last, heads, groups, head, page, q_data_type, fixed_split_size):
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32
        assert fixed_split_size * page == 256
        assert set(last.tolist()) == {page}
        self.rows = [indices[a:b].tolist() for a, b in itertools.pairwise(indptr.tolist())]
        self.kind = heads, groups, head, page, q_data_type

    def run(self, q, pages):
        k, v = (torch.stack([t[rows].transpose(0, 1).flatten(1, 2) for rows in self.rows])
                for t in pages)  # fmt: skip
        assert self.kind == (q.shape[1], k.shape[1], q.shape[2], pages[0].shape[2], q.dtype)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return sdpa(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def test_flashinfer_reads_a_cache_as_it_lies(monkeypatch):
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: name)
    stub = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Planned)
    monkeypatch.setattr(baselines.importlib, "import_module", lambda name: stub)
    baselines._planned.cache_clear()
    way = decode_attentions()["FlashInfer, 256 keys"]
    generator = torch.Generator().manual_seed(0)
    for batch, keys in ((1, 16), (3, 48)):
        shapes = [(batch, 4, 1, 8), (batch, 2, keys, 8), (batch, 2, keys, 8)]
        q, k, v = (torch.randn(s, generator=generator) for s in shapes)
        k = torch.cat([k, k])[batch:]  # one that does not begin where its memory does
        truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(way(q, k, v), truth)
    with pytest.raises(ShapeError, match="multiple of 16"):
        way(q, k[:, :, :20].contiguous(), v[:, :, :20].contiguous())
    baselines._planned.cache_clear()


@pytest.mark.skipif(interpreting(), reason="torch compiles FlexDecoding for a GPU")
def test_flex_decoding_is_attention():
    """And with a fixed number of parts a row has the same bits in every batch."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8, 1, 128), (8, 2, 512, 128), (8, 2, 512, 128)]
    q, k, v = (torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16) for s in shapes)
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)), enable_gqa=True
    )
    for way, compute in decode_attentions().items():
        torch.testing.assert_close(compute(q, k, v).double(), truth, rtol=2e-2, atol=2e-3)
        if way != "FlexDecoding":
            assert torch.equal(compute(q[:1], k[:1], v[:1])[0], compute(q, k, v)[0]), way
