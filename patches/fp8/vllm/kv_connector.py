"""Know which KV connectors keep cached KV that a weight update makes stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flashpatch.errors import PatchError


def keeping(connector: Any) -> str:
    """Return the name of a connector, which may keep KV of finished prompts; empty if there is none."""
    return type(next(_each(connector))).__name__ if connector is not None else ""


def check_reset(connector: Any) -> None:
    """Check that a connector was really reset: vLLM takes one that does not implement it for reset.

    Args:
        connector: the scheduler's KV connector, or None.

    Raises:
        PatchError: it may keep KV of the old policy, and cannot be reset.
    """
    if connector is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    for one in _each(connector):
        if type(one).reset_cache is KVConnectorBase_V1.reset_cache:
            raise PatchError(
                f"{type(one).__name__} does not implement reset_cache(), so it may bring KV of the old policy back",
                patch="fp8.vllm.engine_core_step",
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
