"""Send a LoRA adapter to SGLang's server once, in place of the one it holds."""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import Any

from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC
from flashpatch.patches.fp8.verl_sglang import http_engine
from flashpatch.record import Contract, Patch

ENDPOINT = "load_lora_adapter_from_tensors"


async def on_load(original, self, req: Any) -> Any:
    """Around ``load_lora_adapter_from_tensor``: within a sync, post the adapter once and keep the ranks' receipts.

    Raises:
        PatchError: see `http_engine.post`.
    """
    if WEIGHT_SYNC.sending is None:
        return await original(self, req)
    encoded = [base64.b64encode(part).decode() for part in req.serialized_named_tensors]
    return await send(self, req, {"serialized_named_tensors": encoded}, LOAD.id)


async def send(client: Any, req: Any, tensors: dict[str, Any], patch: str) -> dict[str, Any]:
    """Post an adapter, asking again while requests run under the one before; keep and return the answer.

    Args:
        client: verl's ``AsyncHttpServerAdapter``.
        req: name and configuration of the adapter.
        tensors: the field of the request that holds them.
        patch: id that errors name.
    """
    sending = WEIGHT_SYNC.sending
    fields = {"lora_name": req.lora_name, "config_dict": req.config_dict, "rid": sending.id, **tensors}
    sending.committed = await http_engine.post_patiently(client, ENDPOINT, fields, patch)
    sending.send = time.perf_counter() - sending.began
    return sending.committed


async def on_unload(original, self, lora_name: str) -> Any:
    """Around ``unload_lora_adapter``: within a sync the old adapter stays until the new one takes its name."""
    return await original(self, lora_name) if WEIGHT_SYNC.sending is None else {}


_patch = partial(
    Patch,
    requires="verl>=0.9",
    beside="sglang>=0.5.21",
    evidence="optional",  # a job may have no adapters
    scope=frozenset({"trainer"}),
    needs=("fp8.verl_sglang.server_adapter_update_weights",),
)

LOAD = _patch(
    id="fp8.verl_sglang.load_lora_adapter_from_tensor",
    targets=(f"{http_engine.ENGINE}.load_lora_adapter_from_tensor",),
    wrapper=on_load,
    contract=Contract(params=("req",), mentions=("req.serialized_named_tensors", "req.config_dict")),
    why="verl posts an adapter again when it takes longer than 60 s, and takes a refusal for an error of the connection.",
    how="Posts it once; a refusal raises with the server's text.",
    remove_when="verl's client knows which requests it may repeat.",
)

UNLOAD = _patch(
    id="fp8.verl_sglang.unload_lora_adapter",
    targets=(f"{http_engine.ENGINE}.unload_lora_adapter",),
    wrapper=on_unload,
    contract=Contract(params=("lora_name",)),
    why="verl unloads an adapter before its successor has come; if that is refused, rollouts have none.",
    how="Within verl's update leaves it in place: the new one takes its name.",
    remove_when="SGLang replaces an adapter by itself.",
)
