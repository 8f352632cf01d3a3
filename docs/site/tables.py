"""Tables of the reference, made from the records: names, options, patches; and the list of pages.

``python docs/site/tables.py`` writes the short ones into the pages, so that they are there without the site.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import messages

from flashpatch import evidence, registry
from flashpatch.record import Patch
from flashpatch.settings import options

TREE = Path(__file__).parents[2]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "examples/gpu/README.md": "how-to/first-gpu-job.md",
    "examples/README.md": "how-to/examples.md",
}
"""Pages outside of docs, and what they are called on the site."""

PAGES = TREE / "docs" / "README.md"
WRITTEN = [
    PAGES,
    TREE / "docs" / "reference" / "names-and-options.md",
    TREE / "docs" / "reference" / "patches.md",
]
"""Pages that hold their tables."""
_PLACE = re.compile(r"^<!-- (names|families|options: \w+|pages) -->\n(?:(?:\||No options\.| *- ).*\n)*", re.M)


def filled(page: str) -> str:
    """Return a page with the tables of today below the comments that name them."""
    return _PLACE.sub(lambda match: f"<!-- {match[1]} -->\n{table(*match[1].split(': '))}\n", page)


def table(of: str, which: str | None = None) -> str:
    """Return a Markdown table.

    Args:
        of: ``names``, ``families``, ``options`` and ``patches`` (of a family); ``messages`` are a table per family;
            ``pages`` is a list of the site's pages.
        which: the family.
    """
    return {
        "names": _names,
        "options": lambda: _options(which),
        "families": _families,
        "patches": lambda: _patches(which),
        "pages": _pages,
        "messages": lambda: messages.table(messages.messages(TREE)),
    }[of]()


def _names() -> str:
    rows = [
        (
            f"`{name}`",
            family.about.get(name, family.summary),
            ", ".join(f"`{key} = {options.written(value)}`" for key, value in preset.items()),
        )
        for family in registry.built_in().values()
        for name, preset in registry.family_names(family).items()
    ]
    return _table(("name", "does", "options that the name sets"), rows)


def _options(family: str) -> str:
    rows = []
    for name, option in registry.family(family).options.items():
        _, default, values, meaning = options.row(name, option)
        is_text = not option.choices and option.kind is not bool
        rows.append((f"`{name}`", f"`{default}`", values if is_text else f"`{values}`", meaning))
    return _table(("option", "default", "values", "meaning"), rows) if rows else "No options."


def _families() -> str:
    rows = [
        (
            f"[{family.name}](patches/{family.name}.md)",
            len(family.patches),
            ", ".join(family.names or [family.name]),
            family.summary,
        )
        for family in registry.built_in().values()
    ]
    return _table(("family", "patches", "names", "what they do together"), rows)


def _patches(family: str) -> str:
    patches = registry.family(family).patches
    return _table(("patch", "acts in", "why and how", "live"), map(_patch, patches))


def _patch(patch: Patch) -> Sequence[str]:
    why = " ".join(
        filter(None, (patch.why, patch.how, patch.remove_when and f"Goes when {patch.remove_when}"))
    )
    target = f"`{patch.targets[0]}`" if patch.targets else ""
    where = f"{target}<br>{patch.requires}<br>{', '.join(sorted(patch.scope))}"
    return f"`{patch.id}`", where, why, evidence.explain(patch)


def _pages() -> str:
    """Return the navigation of mkdocs.yml as a list, with links to the files."""
    navigation = (TREE / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    found = re.findall(r'^( +)- "?(.*?)"?:(?: (\S+))?$', navigation, re.M)
    return "\n".join(
        f"{indent[: len(indent) // 2 - 1]}- {_link(title, path)}" for indent, title, path in found
    )


def _link(title: str, path: str) -> str:
    """Return a page's link from the folder of docs; a title without a page stands alone."""
    above = {on_site: f"../{name}" for name, on_site in TOP.items()}
    return f"[{title}]({above.get(path, path)})" if path else title


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(_line(cells) for cells in _with_rule(titles, rows))


def _with_rule(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    yield titles
    yield ["---"] * len(titles)
    yield from rows


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    for path in WRITTEN:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
