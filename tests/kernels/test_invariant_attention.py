"""Attention whose bits depend on what a query sees, alone: in torch on a CPU, and the kernels.

The kernels run in the interpreter where there is no GPU, with products that are chains.
"""

import pytest
import torch

from roundoff.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from roundoff.kernels import attention, interpreting, invariant_attention
from roundoff.kernels.invariant_attention import Seen, seen_by_mask, seen_by_position

DEVICE = "cpu" if interpreting() else "cuda"
CUDA = DEVICE == "cuda"
TYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Tokens around the end of a tile and of a split.
TOKENS = 330 if CUDA else 270
PLACES = (0, 1, 62, 63, 64, 65, 127, 128, 200, 254, 255, 256, 257, TOKENS - 1)


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def sequence(dtype, tokens=TOKENS, batch=2, heads=4, groups=2, head=16):
    q = draw(batch, heads, tokens, head, dtype=dtype)
    return q, *(draw(batch, groups, tokens, head, dtype=dtype, seed=s) for s in (1, 2))


def plain(q, k, v, seen, **kernel):
    return invariant_attention._attend(q, k, v, seen, q.shape[3] ** -0.5, False)


def by_kernel(q, k, v, seen, rows=None, each=None):
    scale = q.shape[3] ** -0.5
    return invariant_attention._by_kernel(q, k, v, seen, scale, False, rows, each)


def at(q, k, queries, causal=True, **where):
    return seen_by_position(len(q), queries, k.shape[2], q.device, causal, **where)


def same(a, b):
    """Bits, but that any NaN is as good as another."""
    return torch.equal(a, b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


#: Splits of a program that has them all.
WHOLE = 1000
slow = pytest.mark.slow(reason="one form of the kernel is tried each time")
#: The computation of this device, and the kernels in each of their forms.
WAYS = [
    pytest.param(plain, {}, id="plain"),
    pytest.param(by_kernel, {"rows": 16, "each": 1}, id="16 rows, a split a program", marks=slow),
    pytest.param(by_kernel, {"rows": 16, "each": 2}, id="16 rows, two splits", marks=slow),
    pytest.param(by_kernel, {"rows": 64, "each": WHOLE}, id="64 rows", marks=slow),
    pytest.param(by_kernel, {"rows": 64, "each": 1}, id="64 rows, a split a program"),
]


@pytest.fixture(scope="module")
def whole():
    """A prefill at once, in each type."""
    return {dtype: plain(*sequence(dtype), at(*sequence(dtype)[:2], TOKENS)) for dtype in TYPES}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_token_has_the_same_bits_in_prefill_chunks_and_decoding(dtype, whole):
    q, k, v = sequence(dtype)
    for i in range(TOKENS) if CUDA else PLACES:
        end = i + 1
        made = attention(q[:, :, i:end], k[:, :, :end], v[:, :, :end])
        assert torch.equal(made, whole[dtype][:, :, i:end]), i
    for size in (1, 7, 50, 64, 100, 256):
        for start in range(0, TOKENS, size) if size > 40 else (0, 3 * size, 37 * size):
            end = min(start + size, TOKENS)
            made = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end])
            assert torch.equal(made, whole[dtype][:, :, start:end]), (start, end)


@pytest.mark.parametrize("rows", [pytest.param(16, marks=slow), 64])
@pytest.mark.parametrize("each", [1, pytest.param(2, marks=slow), WHOLE])
def test_the_kernel_has_the_same_bits_in_every_form(rows, each, chains):
    q, k, v = sequence(torch.float16, batch=1, heads=2, groups=1)
    wanted = by_kernel(q, k, v, at(q, k, TOKENS), 32, WHOLE)
    for start, end in ((0, 1), (63, 64), (64, 65), (250, 262), (TOKENS - 70, TOKENS)):
        part = k[:, :, :end], v[:, :, :end]
        made = by_kernel(q[:, :, start:end], *part, at(q, part[0], end - start), rows, each)
        assert torch.equal(made, wanted[:, :, start:end]), (start, end)


def test_many_splits_are_joined_as_in_one_program(chains, monkeypatch):
    """Eleven, more than the eight that are loaded at a time."""
    monkeypatch.setattr(invariant_attention, "SPLIT", 64)
    q = draw(2, 2, 2, 16, dtype=torch.float16)
    k, v = (draw(2, 1, 680, 16, dtype=torch.float16, seed=s) for s in (1, 2))
    start = torch.tensor([0, 333], device=DEVICE)  # the second has splits without keys
    seen = at(q, k, 2, start=start)
    wanted = by_kernel(q, k, v, seen, None, WHOLE)
    for each in (1, 2, 4, 10):
        assert torch.equal(by_kernel(q, k, v, seen, 16, each), wanted), each


def test_a_tile_that_depends_on_the_batch_is_seen(chains, monkeypatch):
    q, k, v = sequence(torch.float16, batch=1, heads=2, groups=1)
    last = q[:, :, -8:], k, v, at(q, k, 8)
    wanted = by_kernel(*last)
    for name, other in (("TILE", 32), ("SPLIT", 128)):
        with monkeypatch.context() as patch:
            patch.setattr(invariant_attention, name, other)
            assert not torch.equal(by_kernel(*last), wanted)
    assert torch.equal(by_kernel(*last), wanted)


@pytest.mark.parametrize(("way", "form"), WAYS)
@pytest.mark.parametrize("dtype", TYPES if CUDA else TYPES[:1], ids=str)
def test_padding_batch_and_length_of_the_cache_do_not_matter(way, form, dtype, chains):
    q, k, v = sequence(dtype, tokens=70, batch=3, heads=2, groups=1)
    wanted = [way(a[None], b[None], c[None], at(a[None], b[None], 70), **form)
              for a, b, c in zip(q, k, v, strict=True)]  # fmt: skip
    assert torch.equal(way(q, k, v, at(q, k, 70), **form), torch.cat(wanted))
    # Padded on the left, each row by its own, in a cache that is longer than its content.
    left, room = (0, 5, 64), 150
    padded = [torch.full((3, 1, room, 16), float("nan"), device=DEVICE, dtype=dtype)
              for t in (k, v)]  # fmt: skip
    for b, n in enumerate(left):
        for wide, t in zip(padded, (k, v), strict=True):
            wide[b, :, n : n + 70] = t[b]
    start = torch.tensor(left, device=DEVICE)
    made = way(q, *padded, at(q, padded[0], 70, start=start, length=start + 70), **form)
    assert torch.equal(made, torch.cat(wanted))
    last = way(q[:, :, -1:], *padded, at(q, padded[0], 1, start=start, length=start + 70), **form)
    assert torch.equal(last, torch.cat(wanted)[:, :, -1:])


@pytest.mark.parametrize(("way", "form"), WAYS)
def test_a_mask_says_the_same(way, form, chains):
    q, k, v = sequence(torch.float32, tokens=40, heads=2, groups=1)
    positions = torch.arange(40, device=DEVICE)
    causal = (positions <= positions[:, None])[None, None]
    there = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    there[1, :7] = False
    mask = causal & there[:, None, None]
    start = torch.tensor([0, 7], device=DEVICE)
    wanted = way(q, k, v, at(q, k, 40, start=start), **form)
    assert torch.equal(way(q, k, v, seen_by_mask(mask, 2, 40, 40), **form), wanted)
    assert torch.equal(wanted[1, :, :7], torch.zeros_like(wanted[1, :, :7]))  # they see nothing
    # Prompts padded on the right, then tokens: columns in the middle that nobody sees.
    room = torch.tensor([*range(20), *range(33, 53)], device=DEVICE)
    spread = [t.new_full((2, 1, 60, 16), float("nan")) for t in (k, v)]
    for wide, t in zip(spread, (k, v), strict=True):
        wide[:, :, room] = t
    holes = torch.zeros(2, 1, 40, 60, dtype=torch.bool, device=DEVICE)
    holes[..., room] = mask
    assert torch.equal(way(q, *spread, seen_by_mask(holes, 2, 40, 60), **form), wanted)


@pytest.mark.parametrize("keys", [1, 4, 320, 2500])
def test_the_kernel_reads_a_mask_as_torch_does(keys):
    """Stretches, gaps, nothing and everything; strides of any kind, one of them 0."""
    generator = torch.Generator().manual_seed(keys)
    low, high = torch.randint(0, keys + 1, (2, 2, 7, 1), generator=generator)
    at = torch.arange(keys)
    stretches = (at >= low) & (at < high)
    stretches[0, 0], stretches[1, 0] = False, True
    gaps = torch.rand(2, 7, keys, generator=generator) > 0.5
    for mask in (stretches, gaps, gaps[:1].expand(2, -1, -1), gaps.mT.contiguous().mT,
                 gaps.repeat_interleave(2, 2)[..., ::2]):  # fmt: skip
        wanted = invariant_attention._ranges(mask)
        made = invariant_attention._ranges_by_kernel(mask.to(DEVICE))
        assert [t.tolist() for t in made] == [t.tolist() for t in wanted]
        refused = invariant_attention._ranges_by_kernel(mask.to(DEVICE), refuse=True)[1]
        assert refused.tolist() == wanted[1].masked_fill(wanted[2] > 0, -1).tolist()


def test_a_compiled_layer_keeps_no_tensor_with_a_mask():
    """A compiler's CUDA graph must find its pool of memory free."""
    q = torch.randn(1, 2, 4, 8, device=DEVICE)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    for changed in (False, True, True):
        if changed:
            mask[..., 2] = False  # a gap, which must be seen although there was none before
        made = torch.ops.roundoff.invariant_masked_attention(q, q, q, mask, 0.5, False)
        assert torch.equal(
            made, invariant_attention.attention(q, q, q, mask=mask.clone(), scale=0.5)
        )
        assert not any(
            isinstance(t, tuple) and t and isinstance(t[-1], tuple) for t in vars(mask).values()
        )


@pytest.mark.parametrize("kind", ["causal", "padded", "gap"])
def test_torchs_gradients_of_attention_are_those_of_the_formula(kind):
    q, dy = torch.randn(2, 2, 4, 5, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64)
    visible = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    if kind != "causal":
        visible[0, :, :2] = False  # two queries see nothing
    if kind == "gap":
        visible[1, :, 1] = False
    made = invariant_attention._gradients_by_torch(dy, q, k, v, visible, 0.3)
    y = invariant_attention.attention(
        *(t.float() for t in (q, k, v)), mask=visible[:, None], scale=0.3
    ).double()
    wanted = invariant_attention._gradients(dy, q, k, v, y, visible, 0.3)
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_mask_that_changes_is_read_again():
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    before = seen_by_mask(mask, 1, 4, 4)
    assert seen_by_mask(mask, 1, 4, 4) is before
    mask[..., 0] = False
    assert seen_by_mask(mask, 1, 4, 4).first.tolist() == [[0, 1, 1, 1]]
    assert seen_by_mask(mask, 1, 4, 4).last.tolist() == [[0, 2, 3, 4]]
    with torch.inference_mode():
        wide = mask.expand(2, -1, -1, -1)
        assert seen_by_mask(wide, 2, 4, 4).last.tolist() == [[0, 2, 3, 4]] * 2


def test_a_mask_is_read_once_in_each_capture(monkeypatch):
    """What one capture computes is not there in another, nor outside."""
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device=DEVICE).tril()
    outside = seen_by_mask(mask, 1, 4, 4)
    monkeypatch.setattr(invariant_attention, "_capturing", lambda device: True)
    seen = []
    for number in (1, 1, 2, 2, None, None):
        monkeypatch.setattr(invariant_attention, "_capture", lambda number=number: number)
        seen.append(seen_by_mask(mask, 1, 4, 4))
        assert torch.equal(seen[-1].last, outside.last)
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert len({id(s) for s in (outside, *seen[::2], seen[5])}) == 5


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need CUDA")
def test_a_capture_has_a_number():
    numbers = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            numbers += [invariant_attention._capture() for _ in range(2)]
            torch.zeros(1, device=DEVICE)
    assert None not in numbers
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert invariant_attention._capture() is None


@pytest.mark.skipif(not CUDA, reason="CUDA graphs need CUDA")
def test_a_mask_that_changes_between_replays():
    """Attention in a CUDA graph reads the mask that is there when it is replayed."""
    q, k, v = sequence(torch.float16, tokens=70)
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool, device=DEVICE).tril()
    attention(q, k, v, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = [attention(q, k, v, mask=mask) for _ in range(2)]
    for first in (0, 5):
        mask[..., :first] = False
        graph.replay()
        wanted = attention(q, k, v, mask=mask)
        assert all(torch.equal(made, wanted) for made in twice)


@pytest.mark.parametrize(("way", "form"), WAYS)
def test_a_sliding_window_begins_anew_for_each_query(way, form, chains):
    q, k, v = sequence(torch.float32, tokens=40, batch=1, heads=2, groups=1)
    i = torch.arange(40, device=DEVICE)
    window = ((i <= i[:, None]) & (i > i[:, None] - 9))[None, None]
    made = way(q, k, v, seen_by_mask(window, 1, 40, 40), **form)
    for end in (1, 9, 10, 30, 40):
        low = max(0, end - 9)
        kept = k[:, :, low:end], v[:, :, low:end]
        alone = way(q[:, :, end - 1 : end], *kept, at(q, kept[0], 1), **form)
        assert torch.equal(alone, made[:, :, end - 1 : end])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("way", "form"), WAYS)
@pytest.mark.parametrize("which", [1, 2], ids=["keys", "values"])
def test_what_a_query_does_not_see_does_not_reach_it(way, form, which, bad, chains):
    operands = list(sequence(torch.float32, tokens=80, batch=2, heads=1, groups=1))
    wanted = way(*operands, at(*operands[:2], 80), **form)
    operands[which] = operands[which].clone()
    operands[which][0, :, 50, 3] = bad  # a later token of the same sequence
    made = way(*operands, at(*operands[:2], 80), **form)
    assert torch.equal(made[1], wanted[1])
    assert torch.equal(made[0, :, :50], wanted[0, :, :50])
    # What it sees reaches it as it does in decoding.
    q, k, v = operands
    for i in (50, 63, 79):
        one = q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1]
        assert same(way(*one, at(*one[:2], 1), **form), made[:, :, i : i + 1])
    if which == 2:
        assert not made[0, :, 50:, 3].isfinite().any()
        assert made[0, :, 50:, 4].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "head"), [(4, 4, 16), (6, 2, 24), (4, 1, 40)])
@pytest.mark.parametrize("way", [plain, by_kernel])
def test_errors_are_no_larger_than_those_of_torch(way, dtype, heads, groups, head, chains):
    if way is by_kernel and dtype == torch.bfloat16 and not CUDA:
        pytest.skip("the interpreter multiplies bfloat16's bits")
    q, k, v = sequence(dtype, 200 if way is plain else 90, 1, heads, groups, head)
    options = {"is_causal": True, "enable_gqa": True}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    truth = sdpa(q.double(), k.double(), v.double(), **options)
    made = way(q, k, v, at(q, k, q.shape[2])), sdpa(q, k, v, **options)
    ours, theirs = (float((y.double() - truth).square().mean().sqrt()) for y in made)
    assert ours <= 1.1 * theirs


def rms_error(made, truth):
    return float((made.double() - truth).square().mean().sqrt())


def test_scores_in_float32_err_less_than_one_chain_over_the_head(chains):
    q, k, v = sequence(torch.float32, 40, 1, 2, 2, 128)
    one_chain = torch.zeros(1, 2, 40, 40, device=DEVICE)
    for a, b in zip(q.unbind(-1), k.unbind(-1), strict=True):
        one_chain = one_chain + a[..., None] * b[..., None, :]
    truth, rounded = (
        (scores.double() * 128**-0.5).softmax(-1) @ v.double()
        for scores in (q.double() @ k.double().mT, one_chain)
    )
    made = by_kernel(q, k, v, at(q, k, 40, causal=False))
    assert rms_error(made, truth) <= 0.8 * rms_error(rounded, truth)


def test_sums_over_keys_in_float32_err_less_than_one_chain(chains):
    """Of equal weights."""
    q, k, v = sequence(torch.float32, 256, 1, 2, 2, 128)
    one_chain = torch.zeros_like(v[:, :, 0])
    for values in v.unbind(2):
        one_chain = one_chain + values
    truth = v.double().mean(2)
    q = torch.zeros_like(q[:, :, :1])
    made = by_kernel(q, k, v, at(q, k, 1))
    assert rms_error(made[:, :, 0], truth) <= 0.7 * rms_error(one_chain / 256, truth)


@pytest.mark.parametrize("head", [24, 80])
def test_the_scale_is_not_rounded_to_float32(head, chains):
    """Its error would move all scores the same way: by 5e-8 of them for these heads."""
    scores = 4 + 4 * torch.rand(400, generator=torch.Generator().manual_seed(0))
    q = torch.zeros(1, 1, 400, head)
    q[..., 0] = -scores * head**0.5
    k, v = torch.zeros(2, 1, 1, 2, head)
    k[..., 0, 0] = v[..., 0, :] = 1  # the other key has score 0
    q, k, v = (t.to(DEVICE) for t in (q, k, v))
    scores = q[..., :1].double() * head**-0.5
    truth = scores.sigmoid()
    made = by_kernel(q, k, v, at(q, k, 400, causal=False))[..., :1]
    assert abs(float(((made / truth - 1) / scores).mean())) <= 1.5e-8


def test_a_score_of_minus_infinity_has_no_weight(chains):
    q, k, v = sequence(torch.float32, 70, heads=2, groups=2, head=24)
    q[..., 0], k[:, :, 5, 0] = 1.0, -torch.inf
    kept = [torch.cat([t[:, :, :5], t[:, :, 6:]], 2) for t in (k, v)]
    last = at(q, k, 4), at(q, kept[0], 4)
    made, wanted = (
        by_kernel(q[:, :, -4:], *both, seen)
        for both, seen in zip(((k, v), kept), last, strict=True)
    )
    torch.testing.assert_close(made[:, :, -1], wanted[:, :, -1])


@pytest.mark.parametrize("layout", ["by token", "expanded", "sliced"])
def test_strides_do_not_matter(layout):
    q, k, v = sequence(torch.float32, 70)
    if layout == "expanded":
        k, v = (t[:, :1].expand(-1, 2, -1, -1) for t in (k, v))
    wanted = attention(q, *(t.contiguous() for t in (k, v)))
    if layout == "by token":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    elif layout == "sliced":
        q, k, v = (torch.cat([t, t], 3)[..., :16] for t in (q, k, v))
    assert torch.equal(attention(q, k, v), wanted)
    if not CUDA:
        seen = at(q, k, 70)
        torch.testing.assert_close(by_kernel(q, k, v, seen), wanted)


def test_grouped_heads_are_as_their_keys_repeated():
    q, k, v = sequence(torch.float32, 70)
    repeated = (t.repeat_interleave(2, 1) for t in (k, v))
    assert torch.equal(attention(q, k, v), attention(q, *repeated))


def test_causal_counts_from_the_last_key_or_from_the_first():
    q, k, v = sequence(torch.float32, 9)
    assert torch.equal(attention(q[:, :, :4], k, v, causal="top"), attention(q, k, v)[:, :, :4])
    assert torch.equal(attention(q[:, :, 5:], k, v), attention(q, k, v)[:, :, 5:])
    assert torch.equal(attention(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(q))
    assert attention(q[:, :, :0], k, v).shape == (2, 4, 0, 16)


def test_it_is_one_operator_of_a_compiled_graph():
    operators = []

    def backend(graph, _):
        operators.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    q, k, v = sequence(torch.float32, 9)
    compiled = torch.compile(lambda q: attention(q, k, v) + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(q), attention(q, k, v) + 1)
    assert any("roundoff.invariant_attention" in name for name in operators)
    torch._dynamo.reset()


def test_the_operator_agrees_with_its_description():
    q, k, v = sequence(torch.float32, 9)
    first, last, order = at(q, k, 9)
    operator = torch.ops.roundoff.invariant_attention
    torch.library.opcheck(operator, (q, k, v, first, last, order, 0.25, False))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda q, k, v: (q[0], k, v), ShapeError),
        (lambda q, k, v: (q, k, v[:, :, :5]), ShapeError),
        (lambda q, k, v: (q[:1], k, v), ShapeError),
        (lambda q, k, v: (q[..., :8], k, v), ShapeError),
        (lambda q, k, v: (q[:, :3], k, v), ShapeError),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), ShapeError),
        (lambda q, k, v: (q.half(), k, v), DtypeError),
        (lambda q, k, v: (q.int(), k.int(), v.int()), DtypeError),
        (lambda q, k, v: (q, k.to("meta"), v), ArgumentError),
    ],
)
def test_operands_that_do_not_meet(change, error):
    with pytest.raises(error, match="got"):
        attention(*change(*sequence(torch.float32, 9)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mask": torch.ones(2, 1, 9, 8, dtype=torch.bool)}, ShapeError),
        ({"mask": torch.ones(2, 4, 9, 9, dtype=torch.bool)}, ShapeError),
        ({"mask": torch.ones(9, 9, dtype=torch.bool)}, ShapeError),
        ({"mask": torch.ones(1, 1, 9, 9)}, DtypeError),
        ({"start": torch.zeros(3, dtype=torch.int64)}, ShapeError),
        ({"length": torch.zeros(2)}, DtypeError),
        ({"mask": torch.ones(9, 9) > 0, "start": torch.zeros(2)}, ArgumentError),
        ({"causal": "bottom"}, ArgumentError),
        ({"mask": torch.arange(9)[None, None, None] % 3 != torch.arange(9)[:, None] % 3},
         UnsupportedError),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, error):
    there = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    with pytest.raises(error):
        attention(*sequence(torch.float32, 9), **there)


def test_a_row_refused_in_a_capture_is_no_number(chains):
    """Where nothing can be asked, a query whose keys have gaps gets NaN, and no other does."""
    q, k, v = sequence(torch.float32, 70)
    first, last, _ = at(q, k, 70)
    refused = last.clone()
    refused[0, 3] = -1
    for each in (1, WHOLE):
        made = by_kernel(q, k, v, Seen(first, refused), None, each)
        assert made[0, :, 3].isnan().all()
        made[0, :, 3] = 0
        assert made.isfinite().all()
