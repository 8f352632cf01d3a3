"""Print the tests that a change of one patch needs: ``python tests_for.py ID [PREFIX]``, an environment and pytest's arguments.

First the patch's own tests and those that name it or its module, then its family's proof and undo, and last what is
checked of every record. `make test-for PATCH=ID` runs them."""

import functools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from flashpatch import registry
from flashpatch.errors import nearest
from flashpatch.record import Patch

TREE = Path(__file__).parents[2]
OF_EVERY_RECORD = (
    *("tests/package/test_house.py", "tests/patches/test_layers.py", "tests/patches/test_tested.py"),
    *("tests/docs/test_names.py", "tests/docs/test_site.py", "tests/docs/test_messages.py"),
)


def tests_for(patch: Patch) -> tuple[str, list[str]]:
    """Return what follows the prefix of the environment's folder, and pytest's arguments."""
    framework = next((name for name in ("sglang", "verl", "vllm") if name in patch.framework), "verl")
    own = sorted(set(_own(patch)))
    if framework == "sglang":
        suffix = "-sglang-0.5.12" if patch.framework.endswith("0_5_12") else "-sglang"
    else:
        suffix = "" if any(map(_is_for_newer_vllm, own)) else "-0.24"
    paths = [*own, *_probes(patch.family, framework)]
    return suffix, [
        "-m",
        f"not full and not cuda and ({framework} or not (vllm or verl or sglang or trainer))",
        "-k",
        f"not left_behind or {patch.family}",
        *(str(path.relative_to(TREE)) for path in paths),
        "tests/patches/test_undo.py",
        *OF_EVERY_RECORD,
    ]


def _own(patch: Patch) -> Iterator[Path]:
    """Yield the test files of a patch's module, and those that name the patch or the module; else the folder's."""
    function = patch.wrapper or patch.apply
    inside = function.__module__.removeprefix("flashpatch.patches.").split(".")
    beside = TREE / "tests" / "patches" / Path(*inside[:-1]) / f"test_{inside[-1]}.py"
    found = [beside] if beside.exists() else []
    named = re.compile(
        rf"\b{re.escape(patch.id)}\b|from {re.escape(function.__module__.rpartition('.')[0])} import .*\b{inside[-1]}\b|{re.escape(function.__module__)}\b"
    )
    for path in (TREE / "tests" / "patches" / patch.family).rglob("test_*.py"):
        if named.search(_text(path)):
            found.append(path)
    yield from found or [_nearest(beside.parent)]


@functools.cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _is_for_newer_vllm(path: Path) -> bool:
    marks = r"^pytestmark = .*vllm\(least"
    return path.is_file() and bool(re.search(marks, _text(path), re.MULTILINE))


def _nearest(folder: Path) -> Path:
    """Return the nearest folder that has tests: of another generation of the framework, else of the family."""
    other = folder.with_name(folder.name.rstrip("_0123456789"))
    return next(at for at in (folder, other, *folder.parents) if at.is_dir() and any(at.rglob("test_*.py")))


def _probes(family: str, framework: str) -> list[Path]:
    """Return the tests of a family's proof on a framework."""
    folder = TREE / "tests" / "verify" / "probes"
    mine = [folder / f"test_{family}.py", folder / f"test_{family}_{framework}.py"]
    return [path for path in mine if path.exists()]


def main(words: list[str]) -> int:
    """Print the line; 2 for an unknown id."""
    known = registry.patches()
    if not words or words[0] not in known:
        print(
            f"no patch {words[0]!r}. {nearest(words[0], known).partition(' Known: ')[0]}"
            if words
            else __doc__,
            file=sys.stderr,
        )
        return 2
    suffix, arguments = tests_for(known[words[0]])
    print(shlex.join([(words[1] if len(words) > 1 else ".venv") + suffix, *arguments]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
