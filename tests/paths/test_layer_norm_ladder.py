"""The page that writes a layer norm step by step: each step against float64, in any shape; what its
prose says of its output; and page and study compute the same bits.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.kernels import interpreting, shuffled_programs
from roundoff.kernels.ahead import compiled_ahead

from .pages import PAGES, own_cell, record_of, run_cell, study_of
from .test_answers import norm_of
from .test_stories import told as told

PAGE = "plot_layer_norm_ladder"
STUDY = study_of("layer_norm_ladder")
FORWARD, BACKWARD = STUDY["FORWARD"], STUDY["BACKWARD"]
DEVICE = "cpu" if interpreting() else "cuda"
TYPES = (torch.float16, torch.bfloat16, torch.float32)
steps = pytest.mark.parametrize("name", BACKWARD)


def norm_here(rows, columns, dtype):
    return {name: t.to(DEVICE) for name, t in norm_of(rows, columns, dtype).items()}


def near(a, e, dtype, rows=1, small=4.0):
    """Within one rounding of the type, and that of float32 sums of so many rows."""
    largest = e.abs().max().item()
    computed = 16 * rows * torch.finfo(torch.float32).eps * max(largest, 1.0) * small
    # Interpreted, bfloat16 is cut off, not rounded: a whole unit.
    assert (a.double() - e).abs().max() <= 1.01 * torch.finfo(dtype).eps * largest + computed


@settings(max_examples=16, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    columns=st.integers(3, 150),
    dtype=st.sampled_from(TYPES),
    piece=st.sampled_from([8, 32, 256]),
    forward=st.sampled_from(FORWARD),
    backward=st.sampled_from(BACKWARD),
)
def test_any_shape_against_float64(rows, columns, dtype, piece, forward, backward):
    norm = norm_here(rows, columns, dtype)
    x, w = norm["x"], norm["weight"]
    y, stats = STUDY["forward"](forward, x, w, norm["bias"], piece=piece)
    near(y, norm["exact y"], dtype)
    near(stats, torch.stack([norm["mean"], norm["rstd"]]), torch.float32)
    results = STUDY["backward"](backward, norm["dy"], x, w, stats, piece=piece)
    for a, name, more in zip(results, ("dx", "dw", "db"), (1, rows, rows), strict=True):
        e = norm[f"exact {name}"]
        assert (a.shape, a.dtype) == (e.shape, dtype)
        near(a, e, dtype, more)


@steps
def test_only_atomics_depend_on_the_order_of_programs(name):
    if not interpreting():
        pytest.skip("needs the interpreter's order of programs")
    norm = norm_here(12, 20, torch.float32)
    x, w = norm["x"], norm["weight"]
    _, stats = STUDY["forward"]("pieces", x, w, norm["bias"])
    seen = set()
    for seed in range(3):
        with shuffled_programs(seed):
            results = STUDY["backward"](name, norm["dy"], x, w, stats, piece=16)
        seen.add(tuple(t.numpy().tobytes() for t in results))
    assert (len(seen) > 1) == (name == "atomic")


@pytest.mark.slow(reason="compiled: only a change of the kernels or of Triton can break it")
def test_every_step_fits_a_multiprocessor_where_it_says_so():
    cases = [
        (direction, name, n)
        for direction, names in STUDY["STEPS"].items()
        for name in names
        for n in (4096, 8704, 32768)
        if name not in STUDY["REAL"] and STUDY["fits"](direction, name, n)
    ]
    rows = compiled_ahead([STUDY["to_compile"](*case) for case in cases])
    for (_, name, n), row in zip(cases, rows, strict=True):
        assert row["fit"] >= (2 if name == "two programs" else 1), (name, n)
        if name in ("pieces", "packed", "prefetch", "tiles") and n < 16384:
            assert row["spilled"] <= 8, (name, n)


# --- the page


def test_what_plot_layer_norm_ladder_says_of_its_output(told):
    shown = {}
    for line in told[PAGE].text.splitlines():
        if "different dw: " in line:
            errors, _, different = line.partition("different dw: ")
            shown[line[:10].strip()] = [float(e) for e in errors.split()[-3:]], int(different)
    assert list(shown) == ["atomics", "two stages", "pieces", "prefetch"]
    # An atomic sum adds its rows one by one: the errors of m additions are about 0.2 √m together.
    most = {"atomics": max(3, 0.5 * told[PAGE].names["m"] ** 0.5)}
    for step, (errors, _) in shown.items():
        assert max(errors) < most.get(step, 3), (step, errors)
    assert shown.pop("atomics")[1] > 1, "the order changed nothing"
    assert all(different == 1 for _, different in shown.values())
    blocks, _ = told[PAGE].tables  # the second is of a record
    assert blocks.loc[8192, "spilled"] == 0 < blocks.loc[8704, "spilled"]
    assert blocks.loc[8704, "block"] == 16384
    held = told[PAGE].names["held"]
    assert held.loc[2048, "spilled"] == 0 < held.loc[16384, "spilled"]
    assert held["padding"].tolist() == [7680, 3584, 1536]


def test_what_plot_layer_norm_ladder_says_without_a_bound_number():
    """The second run has no name of its own, nor has the version of Triton."""
    text = PAGES[PAGE].read_text("utf-8")
    record = record_of(PAGE, "nvidia-h200")
    again = record.values["prefetch"]["second"]["value"]
    assert text.count(f"{100 * again:.0f} % in the second run") == 2
    assert f"reach 79 % and\n# {100 * again:.0f} %" in text
    environment = record.provenance["backward"].environment
    assert f"Triton {environment['versions']['triton']}" in text
    ahead, first = (record.values[n]["value"] for n in ("roundoff", "prefetch"))
    assert 0.7 * (ahead - first) < again - first < ahead - first, "the runs lie nearly as far apart"


@pytest.mark.parametrize("shape", [(7, 80), (13, 33), (1, 47)], ids=str)
@pytest.mark.parametrize("name", ["with_atomics", "in_two_stages", "in_pieces", "prefetched"])
def test_the_own_cell_judges_the_functions_of_plot_layer_norm_ladder(told, name, shape, capsys):
    """At sizes that the page does not use; atomics lose the order, and the cell says so."""
    mine = f"def mine(x, dy, w, mean, rstd):\n    return {name}(x, dy, w, mean, rstd)"
    rows, columns = map(str, shape)
    run_cell(PAGE, own_cell(PAGE), dict(told[PAGE].names), mine=mine, ROWS=rows, COLUMNS=columns)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["dx", "dw", "db"]
    same = [line.endswith("same bits: True") for line in lines]
    assert all(float(line.split()[3].rstrip(",")) < 4 for line in lines)
    assert same == [True, *2 * [name != "with_atomics" or shape[0] == 1]]


def test_plot_layer_norm_ladder_and_its_study_agree_bit_for_bit(told):
    names = told[PAGE].names
    [(x, dy)], w, b = STUDY["inputs"](names["m"], names["n"], torch.float32)
    y, stats = STUDY["forward"]("one block", x, w, b)
    if interpreting():
        assert torch.equal(y, names["y"])
    else:  # rows that the study, too, gives eight warps and one program a multiprocessor
        [(x, dy)], w, b = STUDY["inputs"](2 * names["programs"], 3500, torch.float32)
        y, stats = STUDY["forward"]("pieces", x, w, b)
    calls = {"atomic": "with_atomics", "two stages": "in_two_stages", "pieces": "in_pieces"}
    calls["prefetch"] = "prefetched"
    for step, name in calls.items():
        theirs = STUDY["backward"](step, dy, x, w, stats, piece=names["piece"])
        ours = names[name](x, dy, w, *stats)
        if interpreting() or step != "atomic":
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), step
    for name in ("row_forward", "atomic_backward", "simple_backward", "pieces_backward"):
        assert getattr(STUDY["ours"], name).fn.__code__.co_filename.endswith(f"{PAGE}.py")
