"""Switch causes of a gap one at a time, each in an engine of its own, and measure what is left."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flashpatch.patches._shared.child import alone
from flashpatch.settings.selections import names_in
from flashpatch.verify.exact.certificate import Cause, Certificate

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"
RESOLVED = "FLASHPATCH_RESOLVED"  # goes with another FLASHPATCH
STEP = 16
"""Tokens of a step where a prefill is cut."""
EIGHT_BITS = ("fp8", "int8")
ALONE, CACHED = WAYS = ("alone", "cached")
"""Ways to read a prompt: in a step of its own, or after what the prefix cache has of it."""
OTHERS = 3
"""Sequences beside it."""
BLOCK = 32
"""Tokens that come from the prefix cache: a block, of a size that attention for CPUs takes too."""


@dataclass(frozen=True)
class Switch:
    """What is switched, how, and the engine's arguments and the variables for it; ``read`` among the former is one of `WAYS`."""

    name: str
    to: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def measured(
    model: str, engine: Mapping[str, Any], found: Certificate, options: argparse.Namespace
) -> tuple[Cause, ...]:
    """Return the causes that a user can switch in the engine with these arguments, each with the gap that is left.

    ``found`` is the certificate of that engine, ``model`` the trainer's; the options have ``prompt`` and ``seconds``, after
    which one is given up."""
    same = (model, "--json", f"--seconds={options.seconds}", f"--prompt={options.prompt}")
    same = (*same, *([f"--rollout={found.engine}"] if found.engine else []))
    merged = {"adapter": "", "model_path" if "model_path" in engine else "model": model}
    adapter = [Switch("adapter", "merged into the base", merged)] if engine.get("adapter") else []
    all_of_them = (*adapter, *switches(engine, found.quantization, found.engine))
    return tuple(_run(switch, same, engine, found.kl) for switch in all_of_them)


def switches(engine: Mapping[str, Any], quantization: str, kind: str = "") -> Iterator[Switch]:
    """Yield what can be switched in an engine with these arguments; ``kind`` is "sglang" if it is SGLang's."""
    is_vllm = kind != "sglang"
    if quantization:
        given = names_in(os.environ.get("FLASHPATCH", ""))
        without = ["bf16" if name.startswith(EIGHT_BITS) else name for name in given]
        change = {"quantization": None} if "quantization" in engine else {}
        if change or without != list(given):
            yield Switch("weights", "16 bits", change, variables={"FLASHPATCH": ",".join(without)})
    if engine.get("dtype") != "float32":
        if not quantization:
            yield Switch("dtype", "float32", {"dtype": "float32"})
        head = {"hf_overrides": {**(engine.get("hf_overrides") or {}), "head_dtype": "float32"}}
        yield Switch("head", "float32", head if is_vllm else {"enable_fp32_lm_head": True})
    if is_vllm and (engine.get("tensor_parallel_size") or 1) > 1:
        yield Switch("ranks", "one", {"tensor_parallel_size": 1})
    cut = {"enable_chunked_prefill": True, "max_num_batched_tokens": STEP, "max_num_seqs": 1}
    if is_vllm and (engine.get("max_num_batched_tokens") or STEP + 1) > STEP:
        yield Switch("chunked prefill", f"steps of {STEP} tokens", cut)
    if not is_vllm:
        yield Switch("cached prefix", f"{BLOCK} tokens read before", {"read": CACHED})
        return
    cache = {"enable_prefix_caching": True, "block_size": BLOCK, "read": CACHED}
    yield Switch("prefix cache", f"{BLOCK} tokens from it", cache)
    if engine.get("enforce_eager", True):
        yield Switch("kernels", "compiled, as without enforce_eager", {"enforce_eager": False})


def _run(switch: Switch, same: tuple[str, ...], engine: Mapping[str, Any], gap: float) -> Cause:
    settings = json.dumps({**engine, **switch.engine})
    variables = {key: value for key, value in os.environ.items() if key != RESOLVED} | switch.variables
    done = alone(["-c", COMMAND, "exact", *same, "--engine", settings], variables)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        found = {"problem": f"cannot compare here: {said[-1]}"}
    if found["problem"]:
        return Cause(switch.name, switch.to, problem=found["problem"])
    return Cause(switch.name, switch.to, found["kl"], 1 - found["kl"] / max(gap, 1e-30))
