"""docs/migrate.md names each setting that ``flashpatch migrate`` knows, and shows what it prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest
from doc_blocks import blocks
from tree import TREE

from flashpatch import registry
from flashpatch.patches._shared import verl_moved

PAGE = (TREE / "docs" / "migrate.md").read_text()


def known() -> list[str]:
    """The names in the tables of the modules."""
    modules = {fork: import_module(name) for fork, name in registry.migrations().items()}
    flashrl, fastrl, flowrl, grpo = (modules[name] for name in ("flashrl", "fastrl", "flowrl", "async-grpo"))
    return [
        *flashrl.PRECISIONS,
        *(name for name in flashrl.flashrl_compat._COUNTERPARTS),
        *flashrl.OWN,
        *(name.rpartition(".")[2] for name in flashrl.CAPS),
        *fastrl.RULES,
        *fastrl.RULES.values(),
        *(name.rpartition(".")[2] for name in fastrl.KNOWN),
        *flowrl.VARIANTS,
        *flowrl.FORK_MANAGERS,
        *grpo.RENAMED,
        *grpo.WORKER_RENAMED,
        *grpo.LOST,
        *grpo.DEFAULTS,
        *(name.strip(".").rpartition(".")[2] for name in (*verl_moved.MOVED, *verl_moved.GONE)),
        *verl_moved.LEGACY_NAMES,
    ]


@pytest.mark.parametrize("name", sorted(set(known())))
def test_a_known_setting_is_on_the_page(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name.removeprefix('verl.trainer.'))}(?![\w-])", PAGE)


def test_what_it_prints_is_what_the_page_shows() -> None:
    shown = [block for block in blocks() if block.page == "docs/migrate.md"]
    [command] = [block for block in shown if not block.note and block.language == ""]
    [output] = [block for block in shown if block.note == "output"]
    words = shlex.split(command.text)
    code = "import sys; from flashpatch.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words[1:]], capture_output=True, text=True)
    assert (words[0], done.returncode, done.stdout) == ("flashpatch", 0, output.text)


@pytest.mark.parametrize("fork", registry.migrations())
def test_the_page_has_a_table_for_each_fork(fork: str) -> None:
    title = import_module(registry.migrations()[fork]).HELP.partition(":")[0].partition(" (")[0]
    assert f"\n## {title}\n" in PAGE
