"""The documentation keeps its shape: short how-tos, measurements and limits in one place each, a README of a page."""

import re

import pytest
from doc_blocks import blocks
from tree import TREE

DOCS = TREE / "docs"
HOW_TO = sorted((DOCS / "how-to").glob("*.md"))
MEASURED = sorted((DOCS / "measured").glob("*.md"))
PAGES = sorted(DOCS.glob("*/**/*.md"))
WHEN = re.compile(r"\*20\d\d-\d\d-\d\d, `[0-9a-f]{7,}`")
COLUMNS = 88
PHONE = 40  # characters of code in a window of 390 pixels, as GitHub shows it
PLACEHOLDER = re.compile(
    r"[A-Z]+_ADDRESS\b(?<!MASTER_ADDRESS)|\bTODO\b|\bTBD\b|\bFIXME\b|\bLorem\b|(?i:your[-_]org)\b|example\.(?:com|org)"
)
NEVER_RUN = re.compile(
    r"(?i)\b(?:never run|not on a GPU|was not run|were not run|not seen to run|has not run)\b(?!.*limits)"
)


def test_readme_is_a_page():
    text = (TREE / "README.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 80 and len(text.split()) <= 600 and max(map(len, lines)) <= 180
    first_screen = text.partition("\n## ")[0]
    assert "tokens per second" in first_screen and "(docs/measured/gpu.md)" in first_screen
    assert "[truncated importance sampling](" in text and "# in this folder;" in text
    mine = [block for block in blocks() if block.page == "README.md"]
    assert any("flashpatch-verify --live" in block.commands for block in mine)
    assert max(len(line) for block in mine for line in block.text.splitlines()) <= PHONE


def test_nothing_that_is_read_or_installed_holds_a_placeholder():
    read = [
        TREE / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "setup.py", "setup.cfg")
    ]
    shown = [
        *read,
        TREE / "mkdocs.yml",
        *(TREE / "docs").rglob("*.md"),
        *(TREE / ".github").rglob("*.md"),
        *(TREE / ".github").rglob("*.yml"),
    ]
    found = {str(page.relative_to(TREE)): PLACEHOLDER.findall(page.read_text()) for page in shown}
    assert not {page: words for page, words in found.items() if words}


def test_each_page_is_of_one_kind():
    kinds = {"tutorial", "how-to", "reference", "explain", "measured", "develop"}
    assert {page.relative_to(DOCS).parts[0] for page in PAGES} == kinds


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_a_how_to_is_short_and_has_a_command(page):
    assert len(page.read_text().splitlines()) <= 120
    own = [block for block in blocks() if block.page == f"docs/how-to/{page.name}"]
    assert [block for block in own if block.language in ("", "python") and block.note != "output"]


@pytest.mark.parametrize("page", MEASURED, ids=lambda page: page.stem)
def test_each_measurement_says_when_and_at_which_commit(page):
    first, *sections = re.split(r"^## ", page.read_text(), flags=re.M)
    for section in sections or [first]:
        assert WHEN.search(section), section.partition("\n")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_never_ran_is_said_among_the_limits_alone(page):
    if page.name == "limits.md":
        return
    said = [line for line in page.read_text().splitlines() if NEVER_RUN.search(line)]
    assert not said


def test_no_block_of_code_is_cut_in_a_window_of_a_laptop():
    shown = [block for block in blocks() if block.language != "mermaid"]
    assert not [str(block) for block in shown if max(map(len, block.text.splitlines()), default=0) > COLUMNS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_closed(page):
    assert len(re.findall(r"^```", page.read_text(), re.M)) % 2 == 0
