"""What a chart shows: labels, values, intervals, panels, and one colour for one thing."""

import itertools
import math
import warnings

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
import pytest

from roundoff.page import PALETTE, dark
from roundoff.page.charts import COLOURS, dots, lines
from roundoff.page.style import INK

mpl.use("agg")
WAYS = pd.DataFrame({
    "way": ["a", "a", "b", "b"], "runtime": ["torch", "ORT"] * 2,
    "device": ["CPU"] * 2 + ["GPU"] * 2,
    "error": [0.02, 0.0, 1536.2, -0.5], "low": [0.01, 0.0, 1500.0, -0.6],
    "high": [0.03, 0.1, 1600.0, -0.4],
})  # fmt: skip
SIZES = pd.DataFrame({
    "N": [4, 1, 2] * 2, "kernel": ["torch"] * 3 + ["copy"] * 3, "device": ["CPU", "GPU", "GPU"] * 2,
    "speed": [3.0, 1.0, math.nan, 4.0, 4.0, 4.0], "low": 0.5, "high": 5.0,
})  # fmt: skip


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def printed(axis) -> list[str]:
    """The values beside the marks."""
    return [text.get_text() for text in axis.texts]


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_yticklabels()]


def colour_of(axis, name: str) -> str:
    found = {str(a.get_label()): a for a in (*axis.lines, *axis.containers)}[name]
    one = found.get_color() if hasattr(found, "get_color") else found.patches[0].get_facecolor()
    return mpl.colors.to_hex(one)


def test_each_row_has_its_label_and_each_dot_its_value() -> None:
    figure = dots(WAYS, "error", "way", colour="runtime", title="Error", xlabel="absolute")
    (axis,) = figure.axes
    assert labels(axis) == ["a", "b"]
    assert printed(axis) == ["0.02", "1,536", "0", "−0.5"]
    assert axis.get_xlabel() == "absolute"
    assert figure.get_suptitle() == "Error"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["torch", "ORT"]
    assert axis.yaxis_inverted()  # the first row is on top


def test_a_label_can_be_made_of_several_columns() -> None:
    figure = dots(WAYS, "error", lambda row: f"{row['way']} on {row['device']}")
    assert labels(figure.axes[0]) == ["a on CPU", "b on GPU"]


def test_many_dots_are_not_printed_over_each_other() -> None:
    many = pd.DataFrame({"way": [str(i) for i in range(25)], "error": 1.0})
    assert printed(dots(many, "error", "way").axes[0]) == []
    assert len(printed(dots(many[:24], "error", "way").axes[0])) == 24


@pytest.mark.parametrize("bars", [True, False])
def test_a_zero_stands_at_the_left_end_of_a_logarithmic_axis(bars: bool) -> None:
    frame = pd.DataFrame({"way": ["a", "b", "c"], "error": [0.02, 0.0, 3.0]})
    (axis,) = dots(frame, "error", "way", log=True, bars=bars).axes
    assert axis.get_xscale() == "log"
    left, right = axis.get_xlim()
    assert 0 < left < 0.02
    assert right > 3
    assert printed(axis) == ["0.02", "0", "3"]
    assert axis.texts[1].xy == (left, 1)
    if not bars:
        assert axis.lines[0].get_xdata().tolist() == [0.02, left, 3.0]


def test_zeros_alone_have_no_logarithmic_axis() -> None:
    frame = pd.DataFrame({"way": ["a", "b"], "error": [0.0, 0.0]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = dots(frame, "error", "way", log=True)
        figure.draw_without_rendering()
    assert figure.axes[0].get_xscale() == "linear"
    assert printed(figure.axes[0]) == ["0", "0"]


def test_a_missing_value_is_not_printed() -> None:
    frame = pd.DataFrame({"way": ["a", "b"], "error": [1.0, math.nan]})
    (axis,) = dots(frame, "error", "way").axes
    assert labels(axis) == ["a", "b"]
    assert printed(axis) == ["1"]


def test_bars_start_at_zero() -> None:
    frame = pd.DataFrame({"way": ["a", "b"], "error": [5.0, 6.0]})
    (axis,) = dots(frame, "error", "way", bars=True).axes
    assert axis.get_xlim()[0] == 0
    assert [(p.get_x(), p.get_width()) for p in axis.patches] == [(0, 5), (0, 6)]
    assert dots(WAYS, "error", "way", bars=True).axes[0].get_xlim()[0] <= -0.5


def test_an_interval_is_drawn_from_end_to_end() -> None:
    (axis,) = dots(WAYS[:1], "error", "way", low="low", high="high").axes
    ends = [segment for c in axis.collections for segment in c.get_segments()]
    assert [[0.01, 0.0], [0.03, 0.0]] in [segment.tolist() for segment in ends]
    (axis,) = lines(SIZES[3:], "N", "speed", series="kernel", low="low", high="high").axes
    band = axis.collections[0].get_datalim(axis.transData)
    assert (band.y0, band.y1) == (0.5, 5.0)


def test_small_multiples_share_rows_and_scale() -> None:
    figure = dots(WAYS, "error", "way", colour="runtime", panels="device")
    assert [axis.get_title("left") for axis in figure.axes] == ["CPU", "GPU"]
    assert labels(figure.axes[0]) == ["a", "b"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert [printed(axis) for axis in figure.axes] == [["0.02", "0"], ["1,536", "−0.5"]]
    figure = lines(SIZES, "N", "speed", series="kernel", panels="device")
    assert [axis.get_title("left") for axis in figure.axes] == ["CPU", "GPU"]


def test_rows_of_several_panels_have_room() -> None:
    rows = pd.DataFrame({"way": [str(i) for i in range(20)], "error": 1.0,
                         "panel": ["one"] * 10 + ["two"] * 10})  # fmt: skip
    figure = dots(rows, "error", "way", panels="panel")
    assert figure.get_size_inches()[1] > 20 * 0.25
    assert figure.get_size_inches()[1] == dots(rows, "error", "way").get_size_inches()[1]


def test_one_colour_means_one_thing() -> None:
    reversed_ = WAYS.iloc[::-1]
    for frame in (WAYS, reversed_, WAYS[WAYS["runtime"] == "ORT"]):
        for bars in (True, False):
            (axis,) = dots(frame, "error", "way", colour="runtime", bars=bars).axes
            assert colour_of(axis, "ORT") == COLOURS["ORT"]
    assert colour_of(dots(WAYS, "error", "way", colour="runtime").axes[0], "torch") == PALETTE[0]
    (axis,) = lines(SIZES, "N", "speed", series="kernel").axes
    assert colour_of(axis, "copy") == COLOURS["copy"]
    assert colour_of(axis, "torch") == COLOURS["torch"]


def test_an_unlisted_series_takes_no_colour_of_a_listed_one_beside_it() -> None:
    frame = pd.DataFrame({"N": [1, 2], "ours": [1.0, 2.0], "torch": [1.0, 2.0], "theirs": 3.0})
    (axis,) = lines(frame, "N", ["ours", "torch", "theirs"]).axes
    found = [colour_of(axis, name) for name in ("ours", "torch", "theirs")]
    assert found[1] == COLOURS["torch"]
    assert len(set(found)) == 3


def test_colours_side_by_side_are_told_apart() -> None:
    names = ["roundoff", "torch", "inductor", "Liger", "ceiling"]
    found = [mpl.colors.to_rgb(COLOURS[name]) for name in names]
    apart = [math.dist(a, b) for a, b in itertools.combinations(found, 2)]
    assert min(apart) > 0.3  # the green and the teal of the palette: 0.27


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_of_a_narrow_figure_lies_within_it() -> None:
    names = ["roundoff", "torch", "inductor", "Liger", "ceiling"]
    frame = pd.DataFrame({"N": [1, 2]} | dict.fromkeys(names, 1.0))
    for small in (True, False):
        figure = lines(frame, "N", names, small=small, xlabel="columns N", ylabel="GB/s")
        figure.draw_without_rendering()
        box, whole = figure.legends[0].get_window_extent(), figure.bbox
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1
        assert legend(figure) == names
        assert figure.legends[0]._ncols == (3 if small else 5)


@pytest.mark.parametrize("bars", [True, False])
def test_a_series_without_values_is_not_in_the_legend(bars: bool) -> None:
    frame = pd.DataFrame({"N": [1, 2], "torch": [1.0, math.nan], "inductor": math.nan, "ORT": 2.0})
    assert legend(lines(frame, "N", ["torch", "inductor", "ORT"])) == ["torch", "ORT"]
    tidy = frame.melt("N", var_name="runtime")
    assert legend(dots(tidy, "value", "N", colour="runtime", bars=bars)) == ["torch", "ORT"]


def test_a_series_of_the_second_panel_alone_is_in_the_legend() -> None:
    last = WAYS.assign(error=[1.0, math.nan, 1.0, 2.0])
    assert legend(dots(last, "error", "way", colour="runtime", panels="device")) == ["torch", "ORT"]
    none = WAYS.assign(error=math.nan)
    assert dots(none, "error", "way", colour="runtime").legends == []


def test_more_series_than_markers() -> None:
    frame = pd.DataFrame({"way": "a", "error": 1.0, "k": [f"k{i}" for i in range(10)]})
    assert len(dots(frame, "error", "way", colour="k").axes[0].lines) == 10
    assert len(lines(frame.assign(N=1), "N", "error", series="k").axes[0].lines) == 10


@pytest.mark.parametrize("rows", [1, 4, 20])
def test_a_figure_of_the_answer_box_is_at_most_260_pixels_high(rows: int) -> None:
    frame = pd.DataFrame(
        {"way": [str(i) for i in range(rows)], "error": 1.0, "N": range(1, rows + 1)}
    )
    for figure in (dots(frame, "error", "way", small=True), lines(frame, "N", "error", small=True)):
        width, height = figure.get_size_inches() * 96
        assert height <= 260
        assert width <= 450


def test_lines_are_sorted_and_keep_what_is_there() -> None:
    (axis,) = lines(SIZES, "N", "speed", series="kernel", dashed=["copy"], logx=True, ylabel="GB/s",
                    xlabel="columns", title="Speed").axes  # fmt: skip
    torch, copy = axis.lines
    assert torch.get_xdata().tolist() == [1, 4]
    assert torch.get_ydata().tolist() == [1, 3]
    assert (torch.get_linestyle(), copy.get_linestyle()) == ("-", "--")
    assert torch.get_marker() == "o"
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "2", "4"]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("columns", "GB/s")
    assert axis.get_ylim()[0] == 0


def test_wide_and_tidy_rows_give_the_same_lines() -> None:
    wide = SIZES.pivot(index="N", columns="kernel", values="speed").reset_index()
    figures = lines(SIZES, "N", "speed", series="kernel"), lines(wide, "N", ["torch", "copy"])
    drawn = [
        {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
        for figure in figures
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("draw", [
    lambda: dots(WAYS, "error", "way", reference=1.0),
    lambda: lines(SIZES, "N", "speed", series="kernel", reference=1.0),
])  # fmt: skip
def test_a_reference_is_a_line_across(draw) -> None:
    (axis,) = draw().axes
    ends = [set(line.get_xdata()) | set(line.get_ydata()) for line in axis.lines]
    assert {0, 1} in ends


@pytest.mark.parametrize("draw", [
    lambda: dots(WAYS, "error", "way", colour="runtime", title="Error"),
    lambda: lines(SIZES, "N", "speed", series="kernel", title="Speed"),
])  # fmt: skip
def test_a_chart_turns_dark_and_back(draw) -> None:
    figure = draw()
    figure.draw_without_rendering()
    inks = lambda: {mpl.colors.to_hex(t.get_color()) for t in figure.findobj(mpl.text.Text)}  # noqa: E731
    assert INK in inks()
    with dark(figure):
        assert INK not in inks()
        names = [line.get_color() for axis in figure.axes for line in axis.lines]
        assert COLOURS["torch"] in names
    assert INK in inks()
