"""Damaged and forged rows: every command says what it can, and nothing reaches the terminal or the page."""

import json
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("rich")

import damaged_ledger as damaged
from job_page import Reader

from flashpatch.verify.job import page

ROWS = 20
"""Rows and events of one run."""


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
    for name in ("report --json", "--live --json"):
        json.loads(found[name], parse_constant=lambda word: pytest.fail(f"{name} holds {word}"))
    shown, own = (
        [tag for tag, _ in Reader(one).elements] for one in (found["page"], page.asset("page.html"))
    )
    assert shown == own, "the page has its own elements alone"


@pytest.mark.parametrize("runs", [15, pytest.param(500, marks=pytest.mark.full)])
def test_every_command_bears_damaged_runs(places, runs) -> None:
    seeds = given(seed=st.integers(0, 2**32))
    settings(max_examples=runs, phases=(Phase.generate,))(seeds(lambda seed: check(places, seed)))()


def test_a_table_shows_markup_as_text() -> None:
    table = damaged.report.Table(damaged.MARKUP, ("a",), [(damaged.MARKUP,)])
    assert damaged.drawn(table).count("[/] [red]x[/red]") == 2
