"""Find every door in vLLM's source by which weights can be written, and write the page of them.

    python -m flashpatch.verify.doors /path/to/site-packages/vllm > docs/reference/doors.md

The source is read, not run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashpatch.verify import door_table
from flashpatch.verify.door_table import Door

#: Where vLLM may write weights, but for models and layers, which it calls through their ``load_weights``.
_FOLDERS = (
    "v1/worker",
    "v1/executor",
    "v1/engine",
    "distributed",
    "model_executor/model_loader",
    "entrypoints",
    "snapshot",
    "device_allocator",
    "lora",
    "ray",
)
_WORKERS = ("v1/worker/worker_base.py", "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py")
_LOADS = frozenset(
    {
        "load_weights",
        "load_state_dict",
        "replace_parameter",
        "weight_loader",
        "process_weights_after_loading",
        "rearrange_expert_weights_inplace",
    }
)
_BACKEND = re.compile(r'WeightTransferEngineFactory\.register_engine\(\s*"([^"]+)"')


def of_vllm(root: Path) -> set[str]:
    """Return the doors of a vLLM, named as in `door_table`; ``root`` is its package's folder."""
    factory = root / "distributed/weight_transfer/factory.py"
    backends = _BACKEND.findall(factory.read_text()) if factory.is_file() else []
    methods = {name for file in _WORKERS for name in _worker_methods(ast.parse((root / file).read_text()))}
    found = {f"backend {name}" for name in backends} | {
        f"rpc {name}" for name in methods - door_table.VLLM_HARMLESS
    }
    for folder in _FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            found.update(f"{module}:{name}" for name in _writers(ast.parse(file.read_text())))
    return found


def unnamed(found: set[str], table: Sequence[Door] = door_table.VLLM) -> set[str]:
    """Return the doors of which a table does not say what becomes of them."""
    return found - {name for door in table for name in door.doors}


def page(table: Sequence[Door] = door_table.VLLM) -> str:
    """Return the page of a table."""
    lines = [
        "# Doors",
        "",
        "Every function of vLLM that can write weights after they were loaded, and what becomes of it while `fp8`, `int8` or",
        "`bf16` is on. Written by `python -m flashpatch.verify.doors` from `verify/door_table.py`; a test reads the installed",
        "vLLM's source and fails when it has one that is not listed. Models and layers are left out: they are loaded through",
        "`load_weights`. Checked on the sources of vLLM 0.24, 0.28, 0.30, 0.32 and 0.33.",
        "",
        "| door | | how, or why |",
        "| --- | --- | --- |",
    ]
    for door in sorted(table, key=lambda one: ("followed", "refused", "cannot", "unseen").index(one.fate)):
        names = "<br>".join(f"`{name}`" for name in door.doors)
        fate = "cannot happen" if door.fate == "cannot" else door.fate
        lines.append(f"| {names} | {fate} | {door.why} |")
    return "\n".join(lines) + "\n"


def _worker_methods(tree: ast.Module) -> Iterator[str]:
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and "Worker" in owner.name:
            for member in owner.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith(
                    "_"
                ):
                    yield member.name


def _writers(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the functions in which a parameter is written, as ``Class.method`` or the outer function's name and its own."""
    for child in ast.iter_child_nodes(node):
        inner = path
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*path, child.name)
        elif _writes(child):
            yield ".".join(path[:2])
        yield from _writers(child, inner)


def _writes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Attribute) and target.attr == "data" for target in node.targets)
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name):
        return called.id in _LOADS
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr in ("copy_", "zero_", "fill_"):
        owner = called.value
        return (isinstance(owner, ast.Attribute) and owner.attr == "data") or (
            isinstance(owner, ast.Name) and owner.id in ("param", "parameter", "weight")
        )
    return called.attr in _LOADS


def main(arguments: Sequence[str]) -> int:
    """Print the page; return 1 if the vLLM in the folder that is given has doors that no row names."""
    print(page(), end="")
    for name in sorted(missing := unnamed(of_vllm(Path(arguments[0])))):
        print(f"not in the table: {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
