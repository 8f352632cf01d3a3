"""Part an engine core from what it has cached under weights that it no longer runs on."""

from __future__ import annotations

from typing import Any

from flashpatch import engine, ledger
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.vllm import kv_connector, prefix_key


def adopt(core: Any, key: prefix_key.PrefixKey | None, patch: str) -> None:
    """Let nothing that is cached answer for a new policy.

    Under the option ``in_flight="keep"`` the prefix cache gets another key and requests that run keep their KV. Else
    prefix, connector and encoder caches are emptied, and requests that run are computed again.

    Args:
        core: the engine core.
        key: of its prefix cache; None if it has none.
        patch: id of the patch that asks.

    Raises:
        PatchError: a cache cannot be reset, or in_flight=keep meets one that would mix two policies.
    """
    keep = engine.options("fp8")["in_flight"] == "keep" and bool(core.scheduler.running)
    if key is not None:
        ledger.note(requests_kept=key.renew(core.scheduler))
    elif keep and (cache := prefix_key.unkeyed(core)):
        raise PatchError(
            f"in_flight='keep' cannot be combined with {cache}: what it holds is of the old policy",
            patch=patch,
            advice="Use in_flight='recompute', or open the engine without it.",
        )
    elif not keep:
        _empty(core, patch)
    if core.vllm_config.model_config.is_multimodal_model:
        core.reset_encoder_cache()


def _empty(core: Any, patch: str) -> None:
    """Empty the prefix cache and what a KV connector holds."""
    running = bool(core.scheduler.running)
    if not core.scheduler.reset_prefix_cache(reset_running_requests=running, reset_connector=True):
        raise PatchError(
            "the prefix cache of the old policy, or what its KV connector holds, could not be reset",
            patch=patch,
            advice="Finish all requests; a KV connector that cannot be reset cannot be used with weight updates.",
        )
    kv_connector.check_reset(core.scheduler.connector)
