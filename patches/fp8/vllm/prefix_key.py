"""Key the prefix cache by the policy: a request meets no block that was computed under another one.

vLLM chains a block's hash from the first block of its request, and the first one takes the request's ``cache_salt`` in.
Under ``in_flight="keep"`` an engine core writes a key there that changes with each commit, so old blocks are found by
nobody and die by age, where the other modes empty the cache. A request that holds KV across a commit gets a key of its
own, and reads nothing from the cache any more: its blocks are of several policies.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.vllm import kv_connector
from flashpatch.record import Contract, Patch

CORE = "vllm.v1.engine.core:EngineCore"


class PrefixKey:
    """Hold the key of one engine core's prefix cache.

    A key cannot be guessed, so no ``cache_salt`` of a request's own leads to blocks of another policy.

    Attributes:
        tokens: prompt tokens that were served from the cache.
        older: of these, tokens from blocks that were cached before the last commit: 0, or the step is refused.
    """

    def __init__(self) -> None:
        self._mark = f"flashpatch-{secrets.token_hex(8)}-"
        self._commits = 0
        self._current = self._named(str(self._commits))
        self._before: dict[
            int, bytes
        ] = {}  # number of a block that was cached at the last commit -> its hash
        self.tokens = self.older = 0

    def enter(self, request: Any) -> None:
        """Key an ``EngineCoreRequest`` whose blocks are not hashed yet."""
        request.cache_salt = self._current + self._own(request)

    def admit(self, request: Any) -> None:
        """Key a ``Request`` again if a commit came after it was keyed: other threads take requests in."""
        if not str(request.cache_salt).startswith(self._current):
            self._change(request, self._current, holds_kv=False)

    def renew(self, scheduler: Any) -> int:
        """Change the key at a commit; return how many requests hold KV across it.

        Requests that hold none, because they wait or were preempted, are computed under the new policy alone and
        get the new key.
        """
        self._commits += 1
        self._current = self._named(str(self._commits))
        self._before = {
            block.block_id: block.block_hash
            for block in scheduler.kv_cache_manager.block_pool.blocks
            if block.block_hash is not None
        }
        kept = 0
        for request in scheduler.requests.values():
            holds_kv = request.num_computed_tokens > 0
            key = self._named(secrets.token_hex(8)) if holds_kv else self._current
            self._change(request, key, holds_kv)
            kept += holds_kv
        return kept

    def check(self, scheduler: Any, new: Iterable[Any]) -> None:
        """Count the tokens that a step's new requests were served from the cache.

        Args:
            scheduler: vLLM's.
            new: the step's ``scheduled_new_reqs``.

        Raises:
            PatchError: some are of an older policy: something else than the key decides what is found.
        """
        served = [(one.block_ids[0], one.num_computed_tokens) for one in new if self._reads(scheduler, one)]
        if not served:
            return
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        for numbers, tokens in served:
            first = next((number for number in numbers if blocks[number].block_hash is not None), -1)
            self.tokens += tokens
            if first in self._before and self._before[first] == blocks[first].block_hash:
                self.older += tokens
        ledger.note(prefix_tokens=self.tokens, prefix_tokens_older=self.older)
        if self.older:
            raise PatchError(
                f"the prefix cache served {self.older} tokens of an older policy",
                patch=ENTER.id,
                advice="Use in_flight='recompute', which empties the cache, and report what else changes cache_salt or "
                "the hashes of blocks.",
            )

    @staticmethod
    def _reads(scheduler: Any, new: Any) -> bool:
        """Whether the computed tokens of a step's new request come from the cache: others hold theirs already."""
        if not new.num_computed_tokens:
            return False
        request = scheduler.requests.get(new.req_id)
        return request is not None and not request.skip_reading_prefix_cache

    def _change(self, request: Any, key: str, holds_kv: bool) -> None:
        request.cache_salt = key + self._own(request)
        request.skip_reading_prefix_cache = holds_kv or request.get_skip_reading_prefix_cache()
        request.block_hashes.clear()
        request.update_block_hashes()

    def _own(self, request: Any) -> str:
        """Return the salt that a request came with."""
        salt = request.cache_salt or ""
        return salt.partition("\n")[2] if salt.startswith(self._mark) else salt

    def _named(self, name: str) -> str:
        return f"{self._mark}{name}\n"


keys: weakref.WeakKeyDictionary[Any, PrefixKey] = weakref.WeakKeyDictionary()


def open_for(core: Any) -> PrefixKey | None:
    """Give an engine core a key if it keeps KV across commits beside its prefix cache; return it, else None."""
    keep = engine.options("fp8")["in_flight"] == "keep"
    if not keep or not core.vllm_config.cache_config.enable_prefix_caching or unkeyed(core):
        return None
    keys[core] = PrefixKey()
    return keys[core]


def unkeyed(core: Any) -> str:
    """Return the name of a cache to which the key does not reach, or in which it was never tested; empty if there is none."""
    scheduler = core.scheduler
    if connector := kv_connector.keeping(scheduler.connector):
        return connector
    if not core.vllm_config.cache_config.enable_prefix_caching:
        return ""
    if scheduler.kv_cache_config.has_mamba_layers:
        return "prefix caching of a model with recurrent layers"
    if getattr(scheduler, "aux_output_connector", None) is not None:
        return "prefix caching and outputs that are stored by block (aux_output_config)"
    return ""


def on_preprocess(original, self, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``EngineCore.preprocess_add_request``, where the blocks of a request are hashed."""
    key = keys.get(self)
    if key is not None:
        key.enter(request)
    return original(self, request, *args, **kwargs)


def on_add_request(original, self, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``EngineCore.add_request``, in the thread that commits."""
    key = keys.get(self)
    if key is not None:
        key.admit(request)
    return original(self, request, *args, **kwargs)


_patch = partial(
    Patch,
    requires="vllm>=0.24",
    scope=frozenset({"engine-core"}),
    evidence="step",
    when="in_flight=keep",
    needs=("fp8.vllm.engine_core_init",),
    why="vLLM finds cached blocks by tokens alone, whichever weights computed them.",
    remove_when="vLLM's block hash has the version of the weights, and blocks of a request that crosses versions are not shared.",
)

ENTER = _patch(
    id="fp8.vllm.preprocess_add_request",
    targets=(f"{CORE}.preprocess_add_request",),
    wrapper=on_preprocess,
    contract=Contract(
        params=("request",),
        mentions=("self.request_block_hasher",),
        exists=(
            "vllm.v1.engine:EngineCoreRequest.cache_salt",
            "vllm.v1.request:Request.update_block_hashes",
            "vllm.v1.request:Request.get_skip_reading_prefix_cache",
            "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
            "vllm.v1.kv_cache_interface:KVCacheConfig.has_mamba_layers",
        ),
    ),
    how="Under in_flight=keep puts a key that changes with each commit before the request's cache_salt.",
)

ADMIT = _patch(
    id="fp8.vllm.add_request",
    targets=(f"{CORE}.add_request",),
    wrapper=on_add_request,
    contract=Contract(params=("request",), mentions=("self.scheduler.add_request",)),
    how="Keys a request again if a commit came between its hashing, in another thread, and its admission.",
)
