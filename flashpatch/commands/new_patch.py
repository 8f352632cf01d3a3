"""Run ``flashpatch new-patch FAMILY TARGET``: write a patch, its place in the family and its test, from the target's signature."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from flashpatch import registry
from flashpatch.commands.report import Table, emit
from flashpatch.contracts import contract, versions
from flashpatch.contracts.source import SourceError, Sources
from flashpatch.errors import PatchError

HELP = "write a new patch into a checkout: its file, its place in the family, its test"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Target:
    """A function or method of an installed framework: its name, the node that defines it, and whose version it has."""

    path: str
    node: Function
    framework: str
    installed: versions.Installed

    @property
    def name(self) -> str:
        """Its last part in snake case: the file's, the function's and the id's."""
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.path.rpartition(":")[2].rpartition(".")[2])
        return words.strip("_").lower()

    @property
    def is_method(self) -> bool:
        return "." in self.path.partition(":")[2]

    @property
    def required(self) -> list[str]:
        """Its positional parameters that have no default, without ``self``."""
        arguments = self.node.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        return names[self.is_method : len(names) - len(arguments.defaults)]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", metavar="FAMILY", help="family that the patch joins, such as grpo")
    parser.add_argument("target", metavar="TARGET", help="what it wraps, as package.module:Qual.name")


def run(args: argparse.Namespace) -> int:
    """Write the files into the checkout in the working directory and return 0.

    Raises:
        PatchError: no checkout, family or such function, or a file of that name is there already."""
    tree = Path.cwd()
    target = _find(args.target)
    patch, test = (tree / part for part in _places(tree, args.family, target))
    joined = _joined(tree / "patches" / args.family / "__init__.py", args.family, target.name)
    for path, text in ((patch, _patch(args.family, target)), (test, _test(args.family, target))):
        path.write_text(text, encoding="utf-8")
    (tree / "patches" / args.family / "__init__.py").write_text(joined, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "flashpatch.write_index"], cwd=tree, check=True)
    written = [str(path.relative_to(tree)) for path in (patch, test)]
    changed = [f"patches/{args.family}/__init__.py", "flashpatch/_index.py"]
    id = _id(args.family, target)
    steps = [
        (f"{written[1]}", "say what is different with the patch; it fails until then"),
        (f"{written[0]}", "write function, docstring, why, remove_when; choose evidence, scope, tested"),
        (f"make test-for PATCH={id}", "the tests that this patch needs"),
    ]
    data = {"id": id, "written": written, "changed": changed, "next": [list(step) for step in steps]}
    rows = [(name, "new") for name in written] + [(name, "changed") for name in changed]
    emit(data, [Table(id, ("file", ""), rows), Table("Next", ("what", ""), steps)], args.json)
    return 0


def _find(path: str) -> Target:
    """Return the target as its source has it; nothing of the framework is imported."""
    package = path.partition(".")[0].partition(":")[0]
    installed, is_target = versions.owner(package), path.count(":") == 1
    if not is_target or installed is None:
        what = "is not installed here" if is_target else "is not of the form package.module:Qual.name"
        raise PatchError(
            f"{path} {what}.", advice="Name a function of a framework that this environment has."
        )
    try:
        found = Sources(contract.installed_root).resolve(path)
    except SourceError as error:
        raise PatchError(f"{path} cannot be read: {error}.", advice="Choose another target.") from error
    node = found.definitions[0].node if found.definitions else None
    if not isinstance(node, Function):
        problem = f"has no {found.missing}" if found.missing else "is no function or method"
        raise PatchError(
            f"{path} {problem} in {installed}.", advice="Choose the function that every path goes through."
        )
    return Target(path, node, package, installed)


def _places(tree: Path, family: str, target: Target) -> tuple[Path, Path]:
    """Return where the patch and its test go, relative to the tree."""
    if not (tree / "patches" / family / "__init__.py").is_file():
        known = sorted(path.parent.name for path in (tree / "patches").glob("*/__init__.py"))
        advice = (
            f"Families here: {', '.join(known)}." if known else "Change to a checkout of FlashPatch first."
        )
        raise PatchError(f"there is no patches/{family} in {tree}.", advice=advice)
    patch, test = (
        Path("patches", family, f"{target.name}.py"),
        Path("tests/patches", family, f"test_{target.name}.py"),
    )
    there = [str(path) for path in (patch, test) if (tree / path).exists()]
    if there or _id(family, target) in registry.patches():
        raise PatchError(
            f"{' and '.join(there) or _id(family, target)} exists already.",
            advice="Add to it, or choose another function.",
        )
    return patch, test


def _id(family: str, target: Target) -> str:
    return f"{family}.{target.framework}.{target.name}"


def _joined(path: Path, family: str, name: str) -> str:
    """Return the source of a family with one more patch, imported and last among its own."""
    source = path.read_text(encoding="utf-8")
    lines, module = source.splitlines(keepends=True), ast.parse(source)
    package = f"flashpatch.patches.{family}"
    keywords = (node for node in ast.walk(module) if isinstance(node, ast.keyword))
    listed = next((keyword.value for keyword in keywords if keyword.arg == "patches"), None)
    own = listed.args if isinstance(listed, ast.Call) else getattr(listed, "elts", [])
    if not own:
        raise PatchError(f"{path} lists no patches.", advice="Add the module by hand.")
    at, line = own[-1].end_col_offset, (own[-1].end_lineno or 1) - 1
    added = name if isinstance(listed, ast.Call) else f"*{name}.patches"
    lines[line] = f"{lines[line][:at]}, {added}{lines[line][at:]}"
    imports = [node for node in module.body if isinstance(node, ast.ImportFrom)]
    there = next((node for node in imports if node.module == package), None)
    if there is not None:
        names = sorted([*(one.name for one in there.names), name])
        lines[there.lineno - 1 : there.end_lineno] = [f"from {package} import {', '.join(names)}\n"]
    else:
        after = [node for node in imports if (node.module or "") < package]
        lines.insert((after[-1].end_lineno or 0) if after else 0, f"from {package} import {name}\n")
    return "".join(lines)


def _patch(family: str, target: Target) -> str:
    """Return the source of a patch that passes every call on."""
    awaited = "await " if isinstance(target.node, ast.AsyncFunctionDef) else ""
    given = ["self"] * target.is_method + target.required
    taken = ", ".join(["original", *given, "*args: Any", "**kwargs: Any"])
    passed = ", ".join([*given, "*args", "**kwargs"])
    release = Version(target.installed.version).release
    shared = [f'"{family}"', f'"{target.framework}>={".".join(map(str, release[:2]))}"']
    shared += ['scope="driver"', 'evidence="optional"', "tested=()"]
    return f'''"""Say here in one sentence what the patch does."""

from __future__ import annotations

from typing import Any

from flashpatch.decorate import Patches

patches = Patches({", ".join(shared)})


@patches.wrap(
    "{target.path}",
    why="Say what goes wrong without it.",
    remove_when="Say when it can go.",
)
{"async " * bool(awaited)}def {target.name}({taken}) -> Any:
    """Say in one line what it does."""
    return {awaited}original({passed})
'''


WARM = {"verl": "VERL", "vllm": "VLLM", "sglang": "VERL_SGLANG"}
"""What the tests' warm interpreters have imported, by the framework that a patch is for."""


def _test(family: str, target: Target) -> str:
    """Return a test that fails until it says what the patch changes."""
    known = target.framework in WARM
    marked = f"pytestmark = pytest.mark.{target.framework}\n\n" if known else ""
    imported = f"warm.{WARM[target.framework]}" if known else "()"
    return f'''"""What is different with the patch of {target.path.rpartition(":")[2]}."""

import cpu_lab
{"import pytest" + chr(10) + "import warm" + chr(10) if known else ""}
{marked}CODE = """
print("call {target.path} here, and print what is different with the patch")
"""


def said(folder, names):
    """Run the code in a process with these names switched on; return what it prints."""
    switched_on = {{"FLASHPATCH": names}} if names else {{}}
    done = cpu_lab.python(CODE, folder, imported={imported}, **switched_on)
    assert done.returncode == 0, cpu_lab.tail(done)
    return done.stdout


def test_what_is_different_with_the_patch(tmp_path):
    assert said(tmp_path, "{family}") != said(tmp_path, "")
'''
