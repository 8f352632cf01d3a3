"""Find every door in an engine's source by which weights can be written, and write the page of them.

    python -m flashpatch.verify.doors /path/to/site-packages > docs/reference/doors.md

The source is read, not run.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashpatch.verify import door_table, door_table_sglang
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
#: Where SGLang loads through models and layers, or processes what was loaded: reached from the other folders alone.
_SGLANG_INNER = frozenset({"models", "layers", "multimodal", "configs", "hardware_backend"})
_SGLANG_LOADS = _LOADS | {
    "_import_static_state",
    "_update_expert_weights",
    "load_lora_adapter",
    "load_weights_and_postprocess",
    "load_weights_only",
    "post_load_weights",
    "postprocess_weights",
    "restore_weights_before_loading",
    "set_embed",
    "set_embed_and_head",
    "update_expert_weights_single_layer",
    "update_weights_from_ipc",
}
_LOADS_A_MODEL = frozenset({"load_weights", "load_state_dict"})
"""They may also be handed on and called elsewhere."""
_BY_NAME = {"getattr": _LOADS_A_MODEL, "setattr": _LOADS_A_MODEL | {"data"}}
_IN_PLACE = re.compile("(?!__)[a-z_]+[a-z]_")
_RECEIVES = frozenset({"broadcast", "irecv", "recv"})
_WRITES_ARGUMENTS = frozenset({"_foreach_copy_", "swap_tensors"})
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


def of_sglang(root: Path) -> set[str]:
    """Return the doors of an SGLang, named as in `door_table_sglang`; ``root`` is its package's folder."""
    srt = root / "srt"
    requests = _requests(ast.parse((srt / "managers/scheduler.py").read_text()))
    found = {f"request {name}" for name in requests if name not in door_table_sglang.HARMLESS}
    for file in sorted(srt.rglob("*.py")):
        place = file.relative_to(srt)
        if place.parts[0] not in _SGLANG_INNER:
            module = ".".join(place.with_suffix("").parts)
            found.update(f"{module}:{name}" for name in _writers(ast.parse(file.read_text()), _SGLANG_LOADS))
    return found


def unnamed(found: set[str], table: Sequence[Door] = door_table.VLLM) -> set[str]:
    """Return the doors of which a table does not say what becomes of them."""
    return found - {name for door in table for name in door.doors}


def page() -> str:
    """Return the page of both tables."""
    lines = [
        "# Doors",
        "",
        "Every function of an engine that can write weights after they were loaded, and what becomes of it while `fp8`, `int8` or",
        "`bf16` is on. Written by `python -m flashpatch.verify.doors` from `verify/door_table.py` and `verify/door_table_sglang.py`;",
        "a test reads the installed engine's source and fails when it has one that is not listed. Models and layers are left out:",
        "they are loaded through `load_weights`. A parameter is known by its name (`param`, `parameter`, `weight`) or by `.data`: what",
        "writes to one under another name alone is not found.",
        "",
        "## vLLM",
        "",
        "Checked on the sources of vLLM 0.24, 0.27, 0.31, 0.32 and 0.33.",
        "",
        *_rows(door_table.VLLM),
        "",
        "## SGLang",
        "",
        "Checked on the sources of SGLang 0.5.12, 0.5.21 and 0.5.23, names below `sglang.srt`.",
        "",
        *_rows(door_table_sglang.SGLANG),
    ]
    return "\n".join(lines) + "\n"


def _rows(table: Sequence[Door]) -> Iterator[str]:
    yield "| door | | how, or why |"
    yield "| --- | --- | --- |"
    for door in sorted(table, key=lambda one: ("followed", "refused", "cannot", "unseen").index(one.fate)):
        names = "<br>".join(f"`{name}`" for name in door.doors)
        fate = "cannot happen" if door.fate == "cannot" else door.fate
        yield f"| {names} | {fate} | {door.why} |"


def _requests(tree: ast.Module) -> Iterator[str]:
    """Yield the requests that SGLang's scheduler dispatches, by the names of their classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and "Dispatcher" in ast.unparse(node.func):
            for pair in ast.walk(node):
                if isinstance(pair, ast.Tuple) and len(pair.elts) == 2 and isinstance(pair.elts[0], ast.Name):
                    yield pair.elts[0].id


def _worker_methods(tree: ast.Module) -> Iterator[str]:
    for owner in tree.body:
        if isinstance(owner, ast.ClassDef) and "Worker" in owner.name:
            for member in owner.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith(
                    "_"
                ):
                    yield member.name


def _writers(node: ast.AST, loads: frozenset[str] = _LOADS, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the functions in which a parameter is written, as ``Class.method`` or the outer function's name and its own."""
    for child in ast.iter_child_nodes(node):
        inner = path
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*path, child.name)
        elif _writes(child, loads):
            yield ".".join(path[:2])
        yield from _writers(child, loads, inner)


def _writes(node: ast.AST, loads: frozenset[str]) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign):
        return any(
            _is_parameter(target) and not isinstance(target, ast.Name)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
    if isinstance(node, ast.Attribute):
        return node.attr in _LOADS_A_MODEL and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Call) and _call_writes(node, loads)


def _call_writes(node: ast.Call, loads: frozenset[str]) -> bool:
    called, given = node.func, node.args
    if isinstance(called, ast.Name):
        named = given[1].value if len(given) > 1 and isinstance(given[1], ast.Constant) else None
        return called.id in loads or named in _BY_NAME.get(called.id, ())
    if not isinstance(called, ast.Attribute):
        return False
    if called.attr in _RECEIVES:
        return any(isinstance(one, ast.Attribute) and one.attr == "data" for one in given)
    if called.attr in loads or called.attr in _WRITES_ARGUMENTS:
        return True
    return bool(_IN_PLACE.fullmatch(called.attr)) and _is_parameter(called.value)


def _is_parameter(node: ast.expr) -> bool:
    """Whether an expression is a parameter, by its name, or its ``data``, or items of these; items of ``self.data`` are those
    of a table."""
    whole = node.value if isinstance(node, ast.Subscript) else node
    if isinstance(whole, ast.Attribute):
        return whole.attr == "data" and (whole is node or ast.unparse(whole) != "self.data")
    return isinstance(whole, ast.Name) and whole.id in ("param", "parameter", "weight")


def main(arguments: Sequence[str]) -> int:
    """Print the page; return 1 if an engine below the folders that are given has doors that no row names."""
    print(page(), end="")
    missing: set[str] = set()
    for folder in map(Path, arguments):
        if (folder / "vllm").is_dir():
            missing |= unnamed(of_vllm(folder / "vllm"))
        if (folder / "sglang").is_dir():
            missing |= unnamed(of_sglang(folder / "sglang"), door_table_sglang.SGLANG)
    for name in sorted(missing):
        print(f"not in the table: {name}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
