"""The pictures of docs: each is drawn from numbers that are kept, with units and round ticks."""

import json
import re
import tomllib

import pytest
from example_pictures import imported, png_text
from tree import TREE

IMAGES = TREE / "docs" / "images"
SCREENSHOTS = {"report"}
PAGES = [page.read_text() for page in TREE.glob("docs/**/*.md")]
SHOWN = sorted({name for page in PAGES for name in re.findall(r"images/(\w+)\.png", page)} - SCREENSHOTS)
NUMBER = re.compile(r"[\N{MINUS SIGN}-]?[0-9.]+")
DATA = sorted(IMAGES.glob("data/*.json"))


@pytest.fixture(scope="module")
def pictures():
    pytest.importorskip("matplotlib")
    with imported() as module:
        yield module


def test_each_picture_of_docs_has_its_numbers_and_no_other_is_kept():
    kept = sorted({file.stem for file in IMAGES.glob("*.png")} - SCREENSHOTS)
    assert SHOWN == [file.stem for file in DATA] == kept != []


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_a_picture_of_docs_is_drawn_from_its_numbers(file, pictures):
    numbers = json.loads(file.read_text())
    drawn = png_text(file.parents[1] / f"{file.stem}.png")["Numbers"]
    assert drawn == pictures.digest(numbers), "make pictures"
    figure = pictures.figure(numbers)
    figure.canvas.draw()
    for axes in figure.axes:
        assert (title := axes.get_title(loc="left"))
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()]
            values = [tick.replace("\N{MINUS SIGN}", "-") for tick in ticks if NUMBER.fullmatch(tick)]
            assert axis.get_label_text() or not values, f"{title}: numbers without a unit"
            digits = [value.strip("-0.").replace(".", "").rstrip("0") for value in values]
            assert all(len(found) <= 2 for found in digits), f"{title}: ticks at {values}"


def test_the_charts_of_readme_are_drawn_from_numbers_that_the_pages_have(monkeypatch):
    monkeypatch.syspath_prepend(TREE / "examples" / "pictures")
    import bars
    import first_screen

    numbers, rows = (tomllib.loads(script.NUMBERS.read_text()) for script in (first_screen, bars))
    drawn = first_screen.charts(numbers)
    kept = {path.name: path.read_text() for path in IMAGES.glob("*.svg")}
    assert kept == drawn | bars.charts(rows), "make pictures"
    for name, one in rows.items():
        page = (TREE / "docs" / "measured" / f"{name}.md").read_text()
        assert page.count(f"../images/bars-{name}-") == 2
        assert [says for *_, says in one["rows"] if says not in page] == []
    assert all(f"docs/images/{name}" in (TREE / "README.md").read_text() for name in drawn)
    speed = numbers["speed"]
    page = (TREE / "docs" / "measured" / "gpu.md").read_text()
    assert re.findall(r"batch (\d+) \| (\d+) \| (\d+)", page) == [tuple(map(str, speed["batch"]))]
    for name, key in ("stock, bf16", "stock"), ("`fp8`", "flashpatch"):
        [row] = re.findall(rf"^\| {name} \| (\d.*) \|$", page, re.M)
        assert [int(re.sub(r",| \(.*", "", cell)) for cell in row.split(" | ")] == speed[key]
