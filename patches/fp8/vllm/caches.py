"""Reset what an engine core has cached under weights that it no longer runs on."""

from __future__ import annotations

from typing import Any

from flashpatch import engine
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.vllm import kv_connector


def reset(core: Any, patch: str) -> None:
    """Reset prefix, connector and encoder caches; requests that run are computed again, unless the option in_flight is keep.

    Args:
        core: the engine core.
        patch: id of the patch that asks.

    Raises:
        PatchError: a cache cannot be reset, or in_flight=keep meets one that would mix two policies.
    """
    if core.scheduler.running and engine.options("fp8")["in_flight"] == "keep":
        cache = kv_connector.keeping(core.scheduler.connector)
        if core.vllm_config.cache_config.enable_prefix_caching:
            cache = "prefix caching"
        if cache:
            raise PatchError(
                f"in_flight='keep' cannot be combined with {cache}: cached prefixes are of the old policy",
                patch=patch,
                advice="Use in_flight='recompute', or open the engine without it.",
            )
        done = core.scheduler.reset_connector_cache()
    else:
        done = core.scheduler.reset_prefix_cache(
            reset_running_requests=bool(core.scheduler.running), reset_connector=True
        )
    if not done:
        raise PatchError(
            "the prefix cache of the old policy, or what its KV connector holds, could not be reset",
            patch=patch,
            advice="Finish all requests; a KV connector that cannot be reset cannot be used with weight updates.",
        )
    kv_connector.check_reset(core.scheduler.connector)
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()
