"""The README: its numbers are the records', its picture is drawn from them, its metadata agree."""

import re
import sys

from .pages import ROOT, record_of

sys.path.insert(0, str(ROOT / "studies"))
import readme_picture

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


def test_the_picture_is_drawn_from_the_records() -> None:
    """``python studies/readme_picture.py`` draws it again."""
    assert readme_picture.PICTURE.read_text("utf-8") == readme_picture.picture()


def test_the_picture_in_words_has_the_values_in_the_picture() -> None:
    (words, path) = re.findall(r"!\[(.+)\]\((.+)\)", README)[0]
    assert ROOT / path == readme_picture.PICTURE
    for _, _, printed in readme_picture.errors() + readme_picture.texts():
        assert printed in words


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
