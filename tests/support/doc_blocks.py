"""Read fenced blocks out of Markdown, with what the comment before each says about running it."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tree import TREE

PAGES = sorted([*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md")])

_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<note>(?:not run|needs|output)[^>]*?) -->\n)?^ *```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str  # the file, relative to the tree
    line: int  # where the block starts
    language: str  # ``python``, ``toml``, ``json``, or empty for commands of a shell
    text: str  # what it holds
    note: str  # the comment right before it: ``not run: REASON``, ``needs vllm``, ``output`` or empty

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block: comments dropped, lines that end in a backslash joined."""
        lines = re.sub(r"\\\n\s*", " ", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> Iterator[Block]:
    """All blocks of README, CONTRIBUTING, CHANGELOG and the pages below docs/."""
    for path in PAGES:
        text = path.read_text()
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            page, shown = str(path.relative_to(TREE)), textwrap.dedent(match["text"])
            yield Block(page, line, match["language"], shown, (match["note"] or "").strip())
