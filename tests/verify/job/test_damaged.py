"""Damaged and forged rows: every command says what it can, and nothing reaches the terminal or the page."""

import json
import random
from html.parser import HTMLParser

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("rich")

import damaged_ledger as damaged

from flashpatch.verify.job import page

ROWS = 20
"""Rows and events of one run."""


class Tags(HTMLParser):
    """Collect the names of a page's elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs) -> None:
        self.seen.append(tag)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    return folder / "ledger", folder


def check(places, seed: int) -> None:
    home, workdir = places
    damaged.write(home, ROWS, random.Random(seed))
    found = damaged.outputs(home, workdir)
    for name, text in found.items():
        unprintable = sorted({letter for letter in text if not (letter.isprintable() or letter == "\n")})
        assert not unprintable or name == "page", f"{name} prints {unprintable}"
        assert "Traceback" not in text, f"{name}: {text}"
    for name in ("report --json", "trace file", "--live --json"):
        json.loads(found[name], parse_constant=lambda word: pytest.fail(f"{name} holds {word}"))
    tags = Tags(found["page"]).seen
    assert tags == Tags(page.asset("page.html")).seen, "the page has its own elements alone"


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, phases=(Phase.generate,))
def test_a_few_hundred(places, seed) -> None:
    check(places, seed)


@pytest.mark.full
@given(seed=st.integers(0, 2**32))
@settings(max_examples=500, phases=(Phase.generate,))
def test_ten_thousand(places, seed) -> None:
    check(places, seed)


def test_a_table_shows_markup_as_text() -> None:
    table = damaged.report.Table(damaged.MARKUP, ("a",), [(damaged.MARKUP,)])
    assert damaged.drawn(table).count("[/] [red]x[/red]") == 2
