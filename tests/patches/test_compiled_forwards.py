"""No wrapper is in a forward that vLLM compiles: a call cannot be counted there, and torch 2.11 ends with "Unsupported method"."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from flashpatch import registry

pytestmark = pytest.mark.vllm

COMPILED = ("_custom_ops.py", "model_executor", "v1/attention", "lora/layers")
"""Where forwards and what they call are defined, in vLLM's package."""
EAGER = {"__init__", "load_weights", "log", "process_weights_after_loading"}
"""Functions that run before a forward is compiled, or end its trace."""
OUTSIDE = {
    "fp8.vllm.scaled_fp8_quant": "is there on CPUs alone, see its `native`",
    "fp8.vllm_0_24.get_logits": "logits are computed behind the compiled forward",
    "fp8.vllm.apply_weights_sgl": "is called on CPUs alone",
    "fp8.vllm.get_model": "opens a model",
    "cpu.vllm.run_in_subprocess": "opens a model",
}


def test_no_wrapped_function_can_be_reached_from_a_compiled_forward():
    """By the names that functions call, whosoever they are: more is reached than really can be."""
    root, calls = Path(find_spec("vllm").submodule_search_locations[0]), defaultdict(set)
    for path in (file for part in COMPILED for file in (root / part, *(root / part).rglob("*.py"))):
        for function in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if isinstance(function, ast.FunctionDef) and function.name not in EAGER:
                called = (one.func for one in ast.walk(function) if isinstance(one, ast.Call))
                calls[function.name] |= {getattr(one, "attr", getattr(one, "id", "")) for one in called}
    due, reached = [name for name in calls if name.startswith("forward")], set()
    while due:
        if (name := due.pop()) in calls and name not in reached:
            reached.add(name)
            due += calls[name]
    there = tuple(f"vllm.{part.removesuffix('.py').replace('/', '.')}" for part in COMPILED)
    inside = {
        patch.id
        for family in registry.built_in().values()
        for patch in family.patches
        if patch.wrapper is not None
        for target in patch.targets
        if target.startswith(there) and target.replace(":", ".").rpartition(".")[2] in reached
    }
    assert "fp8.vllm.scaled_fp8_quant" in inside and inside <= OUTSIDE.keys(), inside - OUTSIDE.keys()
