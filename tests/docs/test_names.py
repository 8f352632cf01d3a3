"""Files, links, patch ids and modules that the documentation names exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from doc_blocks import PAGES
from tree import TREE

from flashpatch import registry

#: The page that lists what names were before.
HISTORY = "CHANGELOG.md"
#: Patches of packages that PyPI does not have, and so no wheel to check.
UNPUBLISHED = {"fp8.prime_rl.load_weights_kernel"}
CURRENT = [page for page in PAGES if page.name != HISTORY]


def _named(pattern: str) -> list[pytest.param]:
    """Names that match on the pages, but those in which FAMILY stands for the reader's."""
    named = {(page, name) for page in CURRENT for name in re.findall(pattern, page.read_text())}
    found = {(page, name) for page, name in named if "FAMILY" not in name}
    return [pytest.param(page, name, id=f"{page.name}-{name}") for page, name in sorted(found)]


@pytest.mark.parametrize(
    ("page", "path"), _named(r"`((?:flashpatch|patches|verify|tests|examples|benchmarks|docs)/[\w./-]+)`")
)
def test_a_path_exists(page: Path, path: str) -> None:
    assert (TREE / path).exists() or (TREE / "tests" / path).exists()


def _files_of_tables() -> list[pytest.param]:
    """Folder and path of each file that a table names under the heading "file in `FOLDER`"."""
    found = []
    for page in CURRENT:
        folder = ""
        for line in page.read_text().splitlines():
            heading = re.search(r"\| file in `([\w/]+)` \|$", line)
            folder = heading[1] if heading else folder if line.startswith("|") else ""
            named = re.findall(r"`([\w/]+(?:\.py|/))`", line.rpartition(" | ")[2]) if folder else []
            found += [(page, folder, path) for path in named]
    return [pytest.param(folder, path, id=f"{page.name}-{path}") for page, folder, path in found]


@pytest.mark.parametrize(("folder", "path"), _files_of_tables())
def test_a_file_of_a_table_exists(folder: str, path: str) -> None:
    assert (TREE / folder / path).exists() or (TREE / path).exists()


@pytest.mark.parametrize(("page", "link"), _named(r"\]\(([^)#:]+)(?:#[^)]*)?\)"))
def test_a_link_leads_somewhere(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


@pytest.mark.parametrize(("page", "anchor"), _named(r"\]\(([^):]*#[^)]+)\)"))
def test_an_anchor_exists(page: Path, anchor: str) -> None:
    where, _, heading = anchor.partition("#")
    target = page.parent / where if where else page
    titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    assert heading in slugs


@pytest.mark.parametrize(
    ("page", "id"),
    _named(
        r"`((?:fp8|eagle|flowrl|grpo|fsdp|cpu)\.(?:vllm|sglang|verl|verl_vllm|verl_sglang|torch)\.[\w-]+)`"
    ),
)
def test_a_patch_id_is_known(page: Path, id: str) -> None:
    assert id in registry.patches()


@pytest.mark.full
def test_the_compatibility_page_lists_every_patch() -> None:
    """But those of frameworks whose wheels no index has. The page is written at release."""
    page = (TREE / "docs" / "reference" / "compatibility.md").read_text()
    of_frameworks = {id for id, patch in registry.patches().items() if patch.requires}
    missing = {id for id in of_frameworks if f"`{id}`" not in page}
    assert missing <= UNPUBLISHED, "python docs/site/compatibility.py writes it"


@pytest.mark.parametrize(("page", "name"), _named(r"(flashpatch\.(?:patches|verify)\.[\w.]*\w)"))
def test_a_module_or_what_it_defines_exists(page: Path, name: str) -> None:
    parent, _, last = name.rpartition(".")
    file = Path(find_spec(parent).origin)
    inside = (
        file.name == "__init__.py"
        and (file.parent / last).with_suffix(".py").exists()
        or (file.parent / last).is_dir()
    )
    assert inside or re.search(rf"^(?:def|class) {last}\b|^{last}\b.* = ", file.read_text(), re.M)
