"""The rows that are measured on a card, and their sizes, which the fake device divides by `FACTOR`."""

import os
from dataclasses import dataclass

from random_models import Size

FACTOR = 64 if os.environ.get("FAKE_CUDA") else 1
GIB = 1 << 30


def here(number: int, multiple: int = 1) -> int:
    """Return a number of a card's as it is on this device, where it stays a multiple of something."""
    return max(number // FACTOR // multiple, 1) * multiple


DENSE = Size(  # of Qwen2.5-7B
    "7B",
    hidden=here(3584, 128),
    intermediate=here(18944, 128),
    layers=here(28, 2),
    heads=here(28),
    kv_heads=here(4),
    vocab=here(152064, 128),
)
EXPERTS = Size(  # of Qwen3-30B-A3B, but for 16 heads of 128 in the place of 32
    "30B",
    hidden=here(2048, 128),
    intermediate=here(768, 128),
    layers=here(48),
    heads=here(16),
    kv_heads=here(4),
    vocab=here(151936, 128),
    experts=here(128, 16),  # a router of fewer rows is padded, which stock 0.24 refuses in fp8 per channel
)
MODELS = {"7B": DENSE, "30B": EXPERTS}
BATCHES = {here(16, 16): (here(1), here(64), here(256)), here(8192): (here(1), here(64))}
"""Requests at a time by tokens of a prompt. 256 of 8,192 tokens would be 120 GB of cache in bf16."""
TOKENS = {here(16, 16): here(256), here(8192): here(64, 2)}
DRAFTED = here(1), here(8), here(64, 2)
CACHE = 40 * GIB // FACTOR**2
BUCKETS = {"512 MiB": GIB // 2 // FACTOR**2, "2 GiB": 2 * GIB // FACTOR**2}
ROUNDS = here(30, 2)
PROMPTS, RESPONSES, LENGTH = here(32, 4), here(8, 2), here(512)
"""Of a job's step."""


@dataclass(frozen=True)
class Speed:
    """An engine whose tokens per second are measured.

    Attributes:
        name: FlashPatch's; "": stock.
        experts: of a mixture's shapes.
        cache: the type of its KV cache.
        block: opened as verl's ``rollout.quantization=fp8`` opens it.
        drafts: of an exact drafter; 0: there is none.
        writes: what it captures; else its memory is given back unread."""

    name: str
    experts: bool = False
    cache: str = "auto"
    block: bool = False
    drafts: int = 0
    writes: bool = True


NAMES = {"stock": "", "bf16": "bf16", "fp8": "fp8", "fp8_channel": "fp8_channel", "int8": "int8", "verl": ""}
SPEEDS = {"eagle_stock": Speed("", drafts=3), "eagle": Speed("eagle", drafts=3)}
SPEEDS |= {
    f"{model}{cache}{row}": Speed(name, bool(model), "fp8" if cache else "auto", row == "verl")
    for model in ("", "experts_")
    for cache in ("", "kv_")
    for row, name in NAMES.items()
}
SPEEDS |= {"capture": Speed("eagle"), "capture_unwritten": Speed("eagle", writes=False)}
JOBS = {"bf16": "bf16", "fp8": "fp8", "eagle": "fp8,eagle"}
ROWS = {
    "step": tuple(JOBS),
    "tokens": tuple(SPEEDS),
    "update": ("7B_bf16", "7B_fp8", "7B_int8", "30B_bf16", "30B_fp8"),
    "sleep": tuple(f"{name}_{level}" for name in ("stock", "bf16", "fp8") for level in (1, 2)),
    "sglang": ("stock", "bf16", "fp8"),
}


def against(part: str, row: str) -> str:
    """Return the row, measured before it in the same run, that a row is divided by; "": none."""
    if part == "tokens":
        return "eagle_stock" if SPEEDS[row].drafts else "experts_stock" if SPEEDS[row].experts else "stock"
    return {"step": "bf16", "sleep": f"stock_{row[-1]}", "sglang": "stock"}.get(part, "")


def processes(part: str, row: str) -> list[tuple[str, dict[str, str]]]:
    """Return mode and variables of each process that a row needs."""
    if part == "update":  # vLLM's own reload, then FlashPatch's updates
        name = row.partition("_")[2]
        ours = [("update", {"FLASHPATCH": name, "ATOMIC": atomic}) for atomic in ("layer", "model")]
        return [("fresh", {}), *ours]
    if part == "step":
        return [("update", {})]  # it hands FLASHPATCH to the job alone
    name = SPEEDS[row].name if part == "tokens" else row.partition("_")[0].replace("stock", "")
    # What is measured with eagle turns it on itself.
    return [("update", {"FLASHPATCH": name.replace("eagle", "bf16")})] if name else [("fresh", {})]
