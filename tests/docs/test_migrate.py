"""docs/reference/forks.md names each setting that ``flashpatch migrate`` knows, and docs/how-to/from-a-fork.md shows what it prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from doc_blocks import blocks
from tree import TREE

from flashpatch.commands import migrate

PAGE = (TREE / "docs" / "reference" / "forks.md").read_text()
TITLES = {
    "flashrl": "FlashRL",
    "fastrl": "FastRL",
    "flowrl": "FlowRL",
    "async-grpo": "async-grpo",
    "verl": "verl itself",
}


def known() -> set[str]:
    """Names of the table, and the values of theirs that are told apart."""
    names = set()
    for table in migrate._table().values():
        for name, action in table["settings"].items():
            names.add(
                name.rstrip("*").rstrip(".")
                if name.startswith("reward")
                else name.rstrip(".*").rpartition(".")[2]
            )
            if name.isupper():
                names |= {one for key in action.get("values", {}) for one in key.split("|")} - {"*", "1"}
    return names


@pytest.mark.parametrize("name", sorted(known()))
def test_a_known_setting_is_on_the_page(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", PAGE)


def test_what_it_prints_is_what_the_page_shows() -> None:
    shown = [block for block in blocks() if block.page == "docs/how-to/from-a-fork.md"]
    [command] = [block for block in shown if not block.note and block.language == ""]
    [output] = [block for block in shown if block.note == "output"]
    words = shlex.split(command.text)
    code = "import sys; from flashpatch.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words[1:]], capture_output=True, text=True)
    assert (words[0], done.returncode, done.stdout) == ("flashpatch", 0, output.text)


@pytest.mark.parametrize("fork", migrate._table())
def test_the_page_has_a_table_for_each_fork(fork: str) -> None:
    assert f"\n## {TITLES[fork]}\n" in PAGE
