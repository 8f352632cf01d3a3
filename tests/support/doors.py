"""Find every door in an engine's source by which weights can be written. The source is read, not run.

docs/reference/doors.md says what becomes of each; `named` reads it. A door is

- ``rpc NAME``: a public method of vLLM's workers, which anyone may call by ``collective_rpc``;
- ``backend NAME``: a backend of vLLM's ``weight_transfer_config``;
- ``request NAME``: a request that a scheduler of SGLang takes from whoever may send it some;
- ``module:function``: a function in which a parameter is written, or a model's ``load_weights`` is called."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tree import TREE

#: Where vLLM may write weights, but for models and layers, which it calls through their ``load_weights``.
_FOLDERS = (
    *("v1/worker", "v1/executor", "v1/engine", "distributed", "model_executor/model_loader"),
    *("entrypoints", "snapshot", "device_allocator", "lora", "ray"),
)
_WORKERS = ("v1/worker/worker_base.py", "v1/worker/gpu_worker.py", "v1/worker/cpu_worker.py")
_LOADS = {"load_weights", "load_state_dict", "replace_parameter", "weight_loader"}
_LOADS |= {"process_weights_after_loading", "rearrange_expert_weights_inplace"}
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

#: Public methods of vLLM's workers, and requests of SGLang's scheduler, that write no weight.
HARMLESS = frozenset(
    "annotate_profile check_health compile_or_warm_up_model compute_weight_checksums determine_available_memory "
    "execute_dummy_batch execute_model get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats "
    "get_kv_cache_spec get_kv_connector_handshake_metadata get_model_inspection get_simple_cpu_offload_num_cpu_blocks "
    "get_supported_kv_cache_layouts get_supported_tasks init_device initialize_from_config list_loras profile "
    "randomize_dummy_inputs release_late_interaction_query_cache reset_encoder_cache reset_mm_cache sample_tokens "
    "save_sharded_state save_tensorized_model set_kv_cache_layout shutdown sleep_mode_backend supports_draft_weight_updates "
    "synchronize_device take_draft_token_ids update_config update_environment_variables update_max_model_len vocab_size "
    "AbortReq AddExternalCorpusReqInput AttachHiCacheStorageReqInput BatchTokenizedEmbeddingReqInput "
    "BatchTokenizedGenerateReqInput ClearHiCacheReqInput CloseSessionReqInput ConfigureLoggingReq ContinueGenerationReqInput "
    "DestroyWeightsUpdateGroupReqInput DetachHiCacheStorageReqInput DumperControlReqInput ExpertDistributionReq "
    "FlushCacheReqInput FreezeGCReq GetHiCacheL3LayoutReq GetInternalStateReq GetLoadsReqInput GetWeightsByNameReqInput "
    "InitWeightsSendGroupForRemoteInstanceReqInput InitWeightsUpdateGroupReqInput ListExternalCorporaReqInput "
    "OpenSessionReqInput PauseGenerationReqInput PdRoleSwitchReqInput ProfileReq RemoveExternalCorpusReqInput "
    "SendWeightsToRemoteInstanceReqInput SetInternalStateReq ShutdownReq SlowDownReqInput "
    "TokenizedEmbeddingReqInput TokenizedGenerateReqInput UpdateWeightVersionReqInput".split()
)


def of_vllm(root: Path) -> set[str]:
    """Return the doors of a vLLM, named as above; ``root`` is its package's folder."""
    factory = root / "distributed/weight_transfer/factory.py"
    backends = _BACKEND.findall(factory.read_text()) if factory.is_file() else []
    methods = {name for file in _WORKERS for name in _worker_methods(ast.parse((root / file).read_text()))}
    found = {f"backend {name}" for name in backends} | {f"rpc {name}" for name in methods - HARMLESS}
    for folder in _FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            module = ".".join(file.relative_to(root).with_suffix("").parts)
            found.update(f"{module}:{name}" for name in _writers(ast.parse(file.read_text())))
    return found


def of_sglang(root: Path) -> set[str]:
    """Return the doors of an SGLang, named as above; ``root`` is its package's folder."""
    srt = root / "srt"
    requests = _requests(ast.parse((srt / "managers/scheduler.py").read_text()))
    found = {f"request {name}" for name in requests if name not in HARMLESS}
    for file in sorted(srt.rglob("*.py")):
        place = file.relative_to(srt)
        if place.parts[0] not in _SGLANG_INNER:
            module = ".".join(place.with_suffix("").parts)
            found.update(f"{module}:{name}" for name in _writers(ast.parse(file.read_text()), _SGLANG_LOADS))
    return found


def named(engine: str) -> dict[str, str]:
    """Return the doors of an engine, as its heading on the page spells it, and the fate of each."""
    page = (TREE / "docs" / "reference" / "doors.md").read_text()
    part = page.partition(f"\n## {engine}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| ([a-z ]+) \| ", part, re.M)
    found = [(name, fate) for names, fate in rows for name in re.findall(r"`(.*?)`", names)]
    assert len(found) == len(dict(found)), "a door is named twice"
    return dict(found)


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
