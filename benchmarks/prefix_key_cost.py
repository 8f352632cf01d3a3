"""What the key of the prefix cache costs a request of vLLM: part of `bookkeeping.py`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from flashpatch.commands.report import Table

BLOCK, RUNNING = 16, 64


def measure(prompts: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Return, by tokens of the prompt, microseconds per request "stock" and "keyed", and of a "commit"; empty without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    from vllm.v1.engine.core import EngineCore

    import flashpatch
    from flashpatch.patches.fp8.vllm import prefix_key

    stock = EngineCore.preprocess_add_request, EngineCore.add_request
    flashpatch.enable("bf16", in_flight="keep")
    keyed = EngineCore.preprocess_add_request, EngineCore.add_request
    assert stock[0] is not keyed[0] and stock[1] is not keyed[1]
    core, key = _core(), prefix_key.PrefixKey()
    prefix_key.keys[core] = key
    found = {}
    for tokens in prompts:
        took: dict[str, list[float]] = {"stock": [], "keyed": [], "commit": []}
        for number in range(rounds + 1):
            ways = (("stock", stock), ("keyed", keyed))
            for way, (preprocess, add) in ways if number % 2 else reversed(ways):
                took[way].append(_seconds(core, preprocess, add, tokens, number))
            took["commit"].append(_commit(core, key, keyed[0], tokens))
        found[tokens] = {way: 1e6 * min(times[1:]) for way, times in took.items()}
    flashpatch.disable("bf16")
    return found


def table(found: dict[int, dict[str, float]]) -> Table:
    """Return the table of what `measure` gives."""
    rows = [
        (
            str(tokens),
            f"{times['stock']:.1f}",
            f"{times['keyed']:.1f}",
            f"{times['keyed'] / times['stock']:.3f}",
            f"{times['commit'] / 1e3:.1f}",
        )
        for tokens, times in found.items()
    ]
    columns = ("tokens", "stock us", "keyed us", "keyed / stock", f"commit, {RUNNING} running, ms")
    return Table(f"One request's blocks of {BLOCK} hashed, and its admission", columns, rows)


def _core() -> Any:
    """Return vLLM's ``EngineCore`` with what these two functions use of it, and no engine behind it."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine.core import EngineCore

    init_none_hash(sha256)
    core = object.__new__(EngineCore)
    core.mm_receiver_cache = None
    core.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
    core.scheduler = SimpleNamespace(add_request=lambda request: None)
    return core


def _asked(tokens: int, number: int) -> Any:
    import msgspec
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    given = dict(
        request_id=str(number),
        prompt_token_ids=[(number + at) % 50_000 for at in range(tokens)],
        sampling_params=SamplingParams(max_tokens=8),
        arrival_time=0.0,
    )
    needed = [field.name for field in msgspec.structs.fields(EngineCoreRequest) if field.required]
    return EngineCoreRequest(**{**dict.fromkeys(needed), **given})


def _seconds(core: Any, preprocess: Any, add: Any, tokens: int, number: int) -> float:
    asked = [_asked(tokens, 100 * number + one) for one in range(20)]
    start = time.process_time()
    for one in asked:
        add(core, *preprocess(core, one))
    return (time.process_time() - start) / len(asked)


def _commit(core: Any, key: Any, preprocess: Any, tokens: int) -> float:
    from vllm.v1.core.block_pool import BlockPool

    requests = {str(one): preprocess(core, _asked(tokens, one))[0] for one in range(RUNNING)}
    for request in requests.values():
        request.num_computed_tokens = tokens
    pool = BlockPool(RUNNING * tokens // BLOCK, enable_caching=True, hash_block_size=BLOCK)
    scheduler = SimpleNamespace(requests=requests, kv_cache_manager=SimpleNamespace(block_pool=pool))
    start = time.process_time()
    key.renew(scheduler)
    return time.process_time() - start
