"""The README: its numbers and those of its picture are the records', its metadata agree."""

import re

from .pages import ROOT, record_of

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_two_numbers_are_those_of_the_records() -> None:
    first, second = re.findall(r"^\* \*\*([\d.]+) ?(?:times|%)\.\*\*", README, re.MULTILINE)
    gaps = record_of("plot_layer_norm_discrepancies", "nvidia-h200").tables["gaps"]
    (row,) = gaps[gaps["tf32"] == "ORT alone"].to_dict("records")
    assert f"{row['ORT error'] / row['torch error']:.0f}" == first
    texts = record_of("plot_batch_invariance", "nvidia-h200").tables["texts"]
    (row,) = texts[(texts["way"] == "torch") & (texts["served"] == "server")].to_dict("records")
    assert f"{100 * row['other texts']:.0f}" == second
    # Each is said again in the sentence beside it.
    assert " ".join(README.split()).count(f"is {first} times PyTorch's") == 1
    assert README.count(f"{second} % of {row['completions']:,}") == 1


def test_the_picture_and_its_words_have_the_values_of_the_records() -> None:
    """A bar begins at 250, the longest of each half has 330 pixels, and the shortest has two."""
    gaps = record_of("plot_layer_norm_discrepancies", "nvidia-h200").tables["gaps"]
    gaps = gaps.set_index("tf32")
    errors = [gaps["torch error"]["ORT alone"], *gaps["ORT error"][["ORT alone", "neither"]]]
    texts = record_of("plot_batch_invariance", "nvidia-h200").tables["texts"]
    texts = texts[texts["served"] == "server"].set_index("way")["other texts"]
    shares = [texts["torch"], texts["roundoff"]]
    (words, path) = re.findall(r"!\[(.+)\]\((.+)\)", README)[0]
    picture = (ROOT / path).read_text("utf-8")
    lengths = map(float, re.findall(r'<rect x="250" .*width="([\d.]+)"', picture))
    printed = re.findall(r'<text x="[\d.]+" y="\d+">([\d.]+%?)<', picture)
    shown = [f"{error:.3g}" for error in errors] + [f"{share:.0%}" for share in shares]
    assert printed == shown
    assert re.findall(r"\d[\d.]*%?(?=[,.])", words) == shown
    longest = [max(errors)] * 3 + [max(shares)] * 2
    for length, value, most in zip(lengths, errors + shares, longest, strict=True):
        assert abs(length - max(330 * value / most, 2)) < 0.1


def test_every_file_that_the_readme_links_to_is_there() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert len(links) > 3
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_number_that_is_cited_as_an_example_is_recorded_so() -> None:
    page = (ROOT / "docs" / "cite.rst").read_text("utf-8")
    pattern = r"^   (plot_\w+)#([\w.]+), (.+), (\d{4}-\d\d-\d\d), commit (\w+)$"
    ((name, number, machine, date, commit),) = re.findall(pattern, page, re.MULTILINE)
    record = record_of(name, machine.lower().replace(" ", "-"))
    run = record.provenance[record.values[number]["of"]]
    assert (run.date[:10], run.commit[:10]) == (date, commit)
