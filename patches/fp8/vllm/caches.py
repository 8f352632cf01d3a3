"""Part an engine core from what it has cached under weights that it no longer runs on.

Its prefix cache is emptied, or keyed by the policy: a request meets no block that was computed under another one. vLLM chains
a block's hash from the first block of its request, and the first one takes the request's ``cache_salt`` in. Under
``in_flight="keep"`` an engine core writes a key there that changes with each commit, so old blocks are found by nobody and die
by age, where the other modes empty the cache. A request that holds KV across a commit gets a key of its own, and reads nothing
from the cache any more: its blocks are of several policies."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from flashpatch import engine, ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError

CORE = "vllm.v1.engine.core:EngineCore"
_STEP = "fp8.vllm.engine_core_step"


class PrefixKey:
    """Hold the key of one engine core's prefix cache.

    A key cannot be guessed, so no ``cache_salt`` of a request's own leads to blocks of another policy.

    Attributes:
        tokens: prompt tokens that were served from the cache.
        older: of these, tokens from blocks that were cached before the last commit: 0, or the step is refused."""

    def __init__(self) -> None:
        self._mark = f"flashpatch-{secrets.token_hex(8)}-"
        self._commits = 0
        self._current = self._named(str(self._commits))
        #: Number of a block that was cached at the last commit, to its hash.
        self._before: dict[int, bytes] = {}
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
        get the new key."""
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
            PatchError: some are of an older policy: something else than the key decides what is found."""
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
                patch=patches.of(preprocess_add_request).id,
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
    if scheduler.connector is not None:  # it may keep KV of finished prompts
        return type(next(_each(scheduler.connector))).__name__
    if not core.vllm_config.cache_config.enable_prefix_caching:
        return ""
    if scheduler.kv_cache_config.has_mamba_layers:
        return "prefix caching of a model with recurrent layers"
    if getattr(scheduler, "aux_output_connector", None) is not None:
        return "prefix caching and outputs that are stored by block (aux_output_config)"
    return ""


patches = Patches(
    "fp8",
    "vllm>=0.24",
    scope="engine-core",
    when="in_flight=keep",
    why="vLLM finds cached blocks by tokens alone, whichever weights computed them.",
    remove_when="vLLM's block hash has the version of the weights, and blocks of a request that crosses versions are not shared.",
)


@patches.wrap(
    f"{CORE}.preprocess_add_request",
    relies_on=(
        "self.request_block_hasher",
        "vllm.v1.engine:EngineCoreRequest.cache_salt",
        "vllm.v1.request:Request.update_block_hashes",
        "vllm.v1.request:Request.get_skip_reading_prefix_cache",
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        "vllm.v1.kv_cache_interface:KVCacheConfig.has_mamba_layers",
    ),
)
def preprocess_add_request(original, self, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Put a key that changes with each commit before the request's cache_salt, under in_flight=keep."""
    if (key := keys.get(self)) is not None:
        key.enter(request)
    return original(self, request, *args, **kwargs)


@patches.wrap(f"{CORE}.add_request", relies_on="self.scheduler.add_request")
def add_request(original, self, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Key a request again if a commit came between its hashing, in another thread, and its admission."""
    if (key := keys.get(self)) is not None:
        key.admit(request)
    return original(self, request, *args, **kwargs)


def adopt(core: Any, key: PrefixKey | None) -> None:
    """Let nothing that is cached answer for a new policy.

    Under the option ``in_flight="keep"`` the prefix cache gets another key and requests that run keep their KV. Else
    prefix, connector and encoder caches are emptied, and requests that run are computed again.

    Args:
        core: the engine core.
        key: of its prefix cache; None if it has none.

    Raises:
        PatchError: a cache cannot be reset, or in_flight=keep meets one that would mix two policies."""
    keep = engine.options("fp8")["in_flight"] == "keep" and bool(core.scheduler.running)
    if key is not None:
        ledger.note(requests_kept=key.renew(core.scheduler))
    elif keep and (cache := unkeyed(core)):
        raise PatchError(
            f"in_flight='keep' cannot be combined with {cache}: what it holds is of the old policy",
            patch=_STEP,
            advice="Use in_flight='recompute', or open the engine without it.",
        )
    elif not keep:
        _empty(core)
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()


def _empty(core: Any) -> None:
    """Empty the prefix cache and what a KV connector holds."""
    running = bool(core.scheduler.running)
    if not core.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True):
        raise PatchError(
            "the prefix cache of the old policy, or what its KV connector holds, could not be reset",
            patch=_STEP,
            advice="Send requests again when the connector's copies have ended; one without a reset goes with no update.",
        )
    _check_reset(core.scheduler.connector)


def _check_reset(connector: Any) -> None:
    """Refuse a connector, or None, that may keep KV of the old policy: vLLM takes one that does not implement a reset for reset."""
    if connector is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for one in _each(connector):
        if type(one).reset_cache is KVConnectorBase_V1.reset_cache:
            raise PatchError(
                f"{type(one).__name__} does not implement reset_cache(), so it may bring KV of the old policy back",
                patch=_STEP,
                target=type(one).__name__,
                advice="Use a KV connector that can be reset; one of your own returns True from reset_cache().",
            )


def _each(connector: Any) -> Iterator[Any]:
    """Yield a connector, or those that it combines."""
    combined = getattr(connector, "_connectors", None)
    if combined is None:
        yield connector
    else:
        for one in combined:
            yield from _each(one)
