"""The picture of the README, drawn from records: ``python studies/readme_picture.py``.

It writes docs/readme.svg. Nothing is measured here: the rows are those of the pages "Why PyTorch
and ONNX Runtime give different results" and "Why does the batch size change a model's output?".
"""

import html
from pathlib import Path

from roundoff.record import RECORDED, read_record

PICTURE = Path(__file__).parents[1] / "docs" / "readme.svg"
MACHINE = "nvidia-h200"
WIDTH, LEFT, BAR, ROW = 720, 250, 330, 30  # pixels; bars begin at LEFT and are at most BAR long

Bars = list[tuple[str, float, str]]  # label, value, the value as it is printed


def errors() -> Bars:
    """Typical error of LayerNorm and a product in float32, over ε × RMS of the truth."""
    gaps = read_record(RECORDED / "plot_layer_norm_discrepancies" / f"{MACHINE}.json").tables[
        "gaps"
    ]
    rows = gaps.set_index("tf32")
    values = {
        "PyTorch, by default": rows["torch error"]["ORT alone"],
        "ONNX Runtime, by default": rows["ORT error"]["ORT alone"],
        "ONNX Runtime, use_tf32 off": rows["ORT error"]["neither"],
    }
    return [(label, value, f"{value:.3g}") for label, value in values.items()]


def texts() -> Bars:
    """Share of a server's completions that are not what their prompt gets alone, in percent."""
    table = read_record(RECORDED / "plot_batch_invariance" / f"{MACHINE}.json").tables["texts"]
    shares = table[table["served"] == "server"].set_index("way")["other texts"]
    values = {"PyTorch": shares["torch"], "inside roundoff.invariant()": shares["roundoff"]}
    return [(label, 100 * share, f"{share:.0%}") for label, share in values.items()]


def bars(top: float, title: str, rows: Bars) -> list[str]:
    """A title and a bar for each row, from *top* on."""
    lines = [f'<text class="title" x="0" y="{top + 16}">{html.escape(title)}</text>']
    longest = max(value for _, value, _ in rows)
    for i, (label, value, printed) in enumerate(rows):
        y = top + 30 + ROW * i
        length = BAR * value / longest
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end">{html.escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{max(length, 2):.1f}" height="20" rx="2"/>',
            f'<text x="{LEFT + max(length, 2) + 8:.1f}" y="{y + 15}">{printed}</text>',
        ]
    return lines


def picture() -> str:
    """The drawing, as SVG that follows the reader's colour scheme."""
    first = bars(0, "Error of a float32 model on an H200, in ε × RMS of the truth", errors())
    second = bars(140, "Completions that change with the batch: bfloat16, H200", texts())
    height = 140 + 30 + ROW * 2
    style = (
        "text{font:14px system-ui,sans-serif;fill:#24292f}.title{font-weight:600}rect{fill:#2f7fd6}"
        "@media(prefers-color-scheme:dark){text{fill:#d9dee4}}"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<style>{style}</style>",
            *first,
            *second,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), "utf-8")
    print(PICTURE)
