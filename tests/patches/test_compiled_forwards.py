"""No wrapper is in a forward that an engine compiles: a call cannot be counted there, and torch 2.11 ends with "Unsupported method"."""

import ast
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashpatch import registry
from flashpatch.record import Patch

PARTS = {
    "vllm": ("_custom_ops.py", "model_executor", "v1/attention", "lora/layers"),
    "sglang": ("srt/models", "srt/layers", "srt/lora", "srt/batch_invariant_ops"),
}
"""Where forwards and what they call are defined, in an engine's package."""
EAGER = {"__init__", "load_weights", "log", "process_weights_after_loading"}
"""Functions that run before a forward is compiled, or end its trace."""
OUTSIDE = {
    "fp8.vllm.scaled_fp8_quant": "is there on CPUs alone, see its `native`",
    "fp8.vllm_0_24.get_logits": "logits are computed behind the compiled forward",
    "fp8.vllm.apply_weights_sgl": "is called on CPUs alone",
    "fp8.vllm.get_model": "opens a model",
    "fp8.vllm.int8_is_supported": "is asked when a layer is made",
    "cpu.vllm.run_in_subprocess": "opens a model",
    "fp8.sglang_lora.register": "takes the name of an adapter, in another class than any that a forward calls",
}
PLANTED = {
    "vllm": "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
    "sglang": "sglang.srt.layers.layernorm:RMSNorm.forward_native",
}
ENGINES = [pytest.param(name, marks=getattr(pytest.mark, name)) for name in PARTS]


@functools.cache
def reached(engine: str) -> frozenset[str]:
    """Return the names of functions that forwards call, whosoever they are: more is reached than really can be."""
    root, calls = Path(find_spec(engine).submodule_search_locations[0]), defaultdict(set)
    for path in (file for part in PARTS[engine] for file in (root / part, *(root / part).rglob("*.py"))):
        for function in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if isinstance(function, ast.FunctionDef) and function.name not in EAGER:
                called = (one.func for one in ast.walk(function) if isinstance(one, ast.Call))
                calls[function.name] |= {getattr(one, "attr", getattr(one, "id", "")) for one in called}
    due, found = [name for name in calls if name.startswith("forward")], set()
    while due:
        if (name := due.pop()) in calls and name not in found:
            found.add(name)
            due += calls[name]
    return frozenset(found)


def inside(engine: str, records: Iterable[Patch]) -> set[str]:
    """Return the ids of those that wrap what a forward reaches."""
    there = tuple(f"{engine}.{part.removesuffix('.py').replace('/', '.')}" for part in PARTS[engine])
    return {
        patch.id
        for patch in records
        if patch.wrapper is not None
        for target in patch.targets
        if target.startswith(there) and target.replace(":", ".").rpartition(".")[2] in reached(engine)
    }


def records() -> list[Patch]:
    return [patch for family in registry.built_in().values() for patch in family.patches]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_wrapped_function_can_be_reached_from_a_compiled_forward(engine: str) -> None:
    assert inside(engine, records()) <= OUTSIDE.keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_planted_wrapper_is_found(engine: str) -> None:
    some = next(patch for patch in records() if patch.wrapper is not None)
    planted = dataclasses.replace(some, id="fp8.vllm.planted", targets=(PLANTED[engine],))
    assert inside(engine, [planted]) == {"fp8.vllm.planted"}
