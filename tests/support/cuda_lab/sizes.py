"""What `cuda_lab.gpu` measures with on a card, and on the fake device in its place: the one table of sizes."""

import os
from dataclasses import dataclass

from random_models import Size

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        dense: a policy of Qwen2.5-7B's shapes.
        experts: one of Qwen3-30B-A3B's, but for 16 heads of 128 in the place of 32.
        batches: by tokens of a prompt how many requests at a time. 256 of 8,192 tokens would be 120 GB of cache in bf16.
        tokens: by tokens of a prompt how many are answered.
        drafted: requests at a time, of a drafter.
        cache: bytes of the KV cache.
        buckets: most bytes of a bucket of an update.
        rounds: of sleep and wake.
        step: of a job's step: prompts, responses to each, tokens of a response."""

    dense: Size
    experts: Size
    batches: dict[int, tuple[int, ...]]
    tokens: dict[int, int]
    drafted: tuple[int, ...]
    cache: int
    buckets: dict[str, int]
    rounds: int
    step: tuple[int, int, int]


CARD = Sizes(
    dense=Size("7B", hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, vocab=152064),
    experts=Size(
        "30B", hidden=2048, intermediate=768, layers=48, heads=16, kv_heads=4, vocab=151936, experts=128
    ),
    batches={16: (1, 64, 256), 8192: (1, 64)},
    tokens={16: 256, 8192: 64},
    drafted=(1, 8, 64),
    cache=40 * GIB,
    buckets={"512 MiB": 512 * MIB, "2 GiB": 2 * GIB},
    rounds=30,
    step=(32, 8, 512),
)
FAKE = Sizes(
    dense=Size("7B", hidden=256, intermediate=512, layers=2, heads=2, kv_heads=1, vocab=512),
    experts=Size("30B", hidden=256, intermediate=128, layers=1, heads=2, kv_heads=1, vocab=512, experts=8),
    batches={16: (1, 4), 64: (1,)},
    tokens={16: 4, 64: 2},
    drafted=(1, 2),
    cache=16 * MIB,
    buckets={"512 MiB": MIB // 2, "2 GiB": 2 * MIB},
    rounds=3,
    step=(8, 4, 8),
)
HERE = FAKE if os.environ.get("FAKE_CUDA") else CARD


@dataclass(frozen=True)
class Speed:
    """An engine whose tokens per second are measured.

    Attributes:
        name: FlashPatch's; "": stock.
        experts: of a mixture's shapes.
        cache: the type of its KV cache.
        block: opened as verl's ``rollout.quantization=fp8`` opens it.
        drafts: of an exact drafter; 0: there is none."""

    name: str
    experts: bool = False
    cache: str = "auto"
    block: bool = False
    drafts: int = 0


_PLAIN = {"stock": "", **{name: name for name in ("bf16", "fp8", "fp8_channel", "int8")}, "verl": ""}
# They run in this order, the longest doubt first.
SPEEDS = {"eagle_stock": Speed("", drafts=3), "eagle": Speed("eagle", drafts=3), "capture": Speed("eagle")}
SPEEDS |= {
    f"{kind}{engine}": Speed(name, kind == "experts_", "fp8" if kind == "kv_" else "auto", engine == "verl")
    for kind in ("", "kv_", "experts_")
    for engine, name in _PLAIN.items()
    if kind != "experts_" or engine != "fp8_channel"
}
JOBS = {"bf16": "bf16", "fp8": "fp8", "eagle": "fp8,eagle"}
MEASURED = {
    "step": tuple(JOBS),
    "tokens": tuple(SPEEDS),
    "update": ("7B_bf16", "7B_fp8", "7B_int8", "30B_bf16", "30B_fp8"),
    "sleep": tuple(f"{name}_{level}" for name in ("stock", "bf16", "fp8") for level in (1, 2)),
}


def processes(part: str, case: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the processes that a measured case needs: the module of this package, its mode, and variables."""
    if part == "step":
        return [("jobs", "step", {})]
    if part == "update":  # vLLM's own reload, then FlashPatch's updates
        name = case.partition("_")[2]
        ours = [("updates", "update", {"FLASHPATCH": name, "ATOMIC": at}) for at in ("layer", "model")]
        return [("updates", "fresh", {}), *ours]
    lab, name = ("sleeps", case[:-2]) if part == "sleep" else ("speed", SPEEDS[case].name)
    if name in ("", "stock"):
        return [(lab, "fresh", {})]
    return [(lab, "update", {"FLASHPATCH": name.replace("eagle", "bf16")})]  # the lab turns eagle on itself
