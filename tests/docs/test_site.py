"""The documentation site has every page, every public name and every command. `make docs` builds it."""

import re
import sys
from dataclasses import MISSING, fields

import pytest
from tree import TREE

import flashpatch
from flashpatch import registry
from flashpatch.ledger import events, old_runs
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.settings import child_env

sys.path.insert(0, str(TREE / "docs" / "site"))
import tables

yaml = pytest.importorskip("yaml")

CONFIG = yaml.safe_load((TREE / "mkdocs.yml").read_text())


def _pages(nav) -> list[str]:
    """The files of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]


def test_every_page_is_in_the_navigation_once_and_the_list_of_pages_is_that():
    top = tables.TOP
    assert top.keys() == {page.name for page in TREE.glob("*.md")} | {
        "examples/README.md",
        "examples/gpu/README.md",
    }
    below = {
        str(page.relative_to(TREE / "docs")) for page in (TREE / "docs").rglob("*.md") if page != tables.PAGES
    }
    assert sorted(_pages(CONFIG["nav"])) == sorted(below | set(top.values()))
    linked = re.findall(r"\]\((.*)\)$", tables.PAGES.read_text(), re.M)
    above = {f"../{name}": page for name, page in tables.TOP.items()}
    assert [above.get(page, page) for page in linked] == _pages(CONFIG["nav"])


def test_a_page_needs_nothing_from_elsewhere():
    assert CONFIG["theme"]["font"] is False
    plugins = [*map(str, CONFIG["plugins"])]
    assert "extra_javascript" not in CONFIG and "offline" in plugins and "search" in plugins[0]
    assert all((TREE / "docs" / sheet).exists() for sheet in CONFIG["extra_css"])


def test_every_public_name_and_every_command_is_in_the_reference():
    page = (TREE / "docs" / "reference" / "python-api.md").read_text()
    described = re.findall(r"^::: flashpatch\.(\w+)$", page, re.M)
    assert sorted(described) == sorted(set(flashpatch.__all__) - {"__version__"})
    listed = set(re.findall(r"`(\w+)`", page.partition("## ")[0]))
    assert listed >= set(flashpatch.__all__)
    page = (TREE / "docs" / "reference" / "commands.md").read_text()
    shown = re.findall(r"^<!-- help: (.*) -->$", page, re.M)
    ours = [name for name, module in registry.commands().items() if module.startswith("flashpatch.")]
    assert sorted(shown) == sorted(["flashpatch", "flashpatch-verify", *(f"flashpatch {n}" for n in ours)])


@pytest.mark.parametrize("page", tables.WRITTEN, ids=lambda page: page.stem)
def test_tables_are_those_of_the_records(page):
    assert page.read_text() == tables.filled(page.read_text()), "run: python docs/site/tables.py"


def test_every_setting_of_the_drafters_trainer_is_in_the_reference_with_its_default():
    page = (TREE / "docs" / "reference" / "names-and-options.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \|", page.partition("### Settings of `trainer`")[2].partition("## ")[0], re.M
    )
    shown = {}
    for names, defaults in rows[2:]:
        shown.update(zip(names.strip("`").split("`, `"), defaults.strip("`").split("`, `"), strict=True))
    defaults = {one.name: repr(one.default) for one in fields(WorkerSettings) if one.default is not MISSING}
    of_the_job = {"engine", "drafter", "kind", "release", "rank", "ranks"}
    assert shown == {name: said for name, said in defaults.items() if name not in of_the_job}


def test_every_name_patch_and_variable_is_in_the_reference():
    folder = TREE / "docs" / "reference"
    families = {path.stem: path.read_text() for path in (folder / "patches").iterdir()}
    assert set(families) == set(registry.built_in())
    assert all(f"<!-- patches: {name} -->" in page for name, page in families.items())
    environment = (folder / "environment.md").read_text()
    assert all(f"| `{name}` |" in tables.table("names") for name in registry.names())
    listed = "".join(tables.table("patches", name) for name in families)
    assert all(f"| `{id}` |" in listed for id in registry.patches())
    assert all(f"| `{name}` |" in environment for name in child_env.VARIABLES)
    defaults = old_runs.DEFAULT_DAYS, old_runs.DEFAULT_RUNS, events.DEFAULT_BYTES
    assert all(f"unset: {int(default)} |" in environment for default in defaults)
