"""Send each request of a weight update to SGLang's server exactly once, and raise its answer.

A LoRA adapter is sent once too, in place of the one that the server holds."""

from __future__ import annotations

import abc
import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from flashpatch import engine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.update.events import REQUESTS_RUN
from flashpatch.patches.fp8.verl.transfer.weight_sync import WEIGHT_SYNC

ENGINE = "verl.workers.rollout.sglang_rollout.http_server_engine:AsyncHttpServerAdapter"
SELECTOR = "target"
"""The policy alone: SGLang's default would load it into a drafter as well."""
BUSY_SECONDS = 10.0
"""Seconds in which a server's requests may end. It answers before it removes what has ended from its batch."""
_SENT = "anywhere=fp8.verl.validate_config_rollout anywhere=fp8.verl_sglang.server_adapter_update_weights"

patches = Patches(
    "fp8", "verl>=0.9", framework="verl_sglang", beside="sglang>=0.5.21", evidence="update", scope="trainer"
)


async def begin_weight_update(self, selector: str = "all", sync: str = "") -> dict[str, Any]:
    """Open an update session on the server, asking again for `BUSY_SECONDS` while it still has requests; ``selector``
    says which models it updates: target, draft or all; ``sync`` is returned in the receipts, empty: no receipts. Raises
    as `post` does."""
    engine.record_call(patches.of(async_http_server_adapter).id)
    return await post_patiently(self, "begin_weight_update", {"selector": selector, "rid": sync or None})


async def end_weight_update(self) -> dict[str, Any]:
    """End the session: commit the update and flush the cache. Raises as `post` does."""
    return await post(self, "end_weight_update", {})


_METHODS = {"begin_weight_update": begin_weight_update, "end_weight_update": end_weight_update}


def _native(site: Any) -> str | None:
    """Name verl's own method, once its client has one."""
    theirs = vars(_client(site)).get("begin_weight_update")
    return None if theirs in (None, begin_weight_update) else f"{ENGINE}.begin_weight_update"


def _client(site: Any) -> type:
    return site.module.AsyncHttpServerAdapter


@patches.register(
    ENGINE,
    relies_on=(
        "sglang.srt.entrypoints.EngineBase:EngineBase.begin_weight_update",
        "sglang.srt.entrypoints.EngineBase:EngineBase.end_weight_update",
    ),
    native=_native,
    when=_SENT,
    why="SGLang's base class of engines asks for begin_weight_update and end_weight_update, which verl's client has not: "
    "the trainer ends with 'Can't instantiate abstract class'.",
    upstream="sglang/srt/entrypoints/EngineBase.py",
    remove_when="verl's client has both methods.",
)
def async_http_server_adapter(site: Any) -> Callable[[], None]:
    """Give verl's client both methods, as posts to the server."""
    client = _client(site)

    def take_away() -> None:
        for name in _METHODS:
            delattr(client, name)
        abc.update_abstractmethods(client)

    for name, method in _METHODS.items():
        setattr(client, name, method)
    abc.update_abstractmethods(client)
    return take_away


@patches.wrap(
    f"{ENGINE}.update_weights_from_tensor",
    relies_on=(
        "req.serialized_named_tensors",
        "req.load_format",
        "self._make_async_request",
        "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput.selector",
    ),
    when=_SENT,
    why="verl posts a bucket again when it takes longer than 60 s, up to three times, loads the policy into a drafter "
    "too, and has every bucket flush the cache, which SGLang refuses while requests wait.",
    remove_when="verl's client knows which requests it may repeat, and passes selector and flush_cache on.",
)
async def update_weights_from_tensor(original, self, req: Any) -> Any:
    """Post each bucket of a sync once, for the policy alone, without a flush; a refusal raises with the server's text.

    Raises PatchError, see `post`."""
    if WEIGHT_SYNC.sending is None:
        return await original(self, req)
    return await post(self, "update_weights_from_tensor", {**bucket(req), "selector": SELECTOR})


def bucket(req: Any) -> dict[str, Any]:
    """Return the fields of a request for one bucket that are the same on all versions of SGLang."""
    encoded = [base64.b64encode(part).decode() for part in req.serialized_named_tensors]
    return {"serialized_named_tensors": encoded, "load_format": req.load_format, "flush_cache": False}


@patches.wrap(
    f"{ENGINE}.flush_cache",
    relies_on=("self.max_attempts", "sglang.srt.managers.io_struct:EndWeightUpdateReqInput"),
    when=_SENT,
    why="SGLang finishes an update at end_weight_update, which verl never calls; and a flush that fails is only logged.",
    remove_when="verl ends SGLang's session itself.",
)
async def flush_cache(original, self) -> Any:
    """End the session at the end of a sync, which commits the update, flushes the cache and answers with receipts.

    Raises PatchError, see `post`."""
    return await flush_or_end(lambda: original(self), lambda: end_weight_update(self))


async def flush_or_end(
    flush: Callable[[], Awaitable[Any]], end: Callable[[], Awaitable[dict[str, Any]]]
) -> Any:
    """Await ``end``, once, at the end of a sync, and keep its answer; ``flush`` at any other time.

    A new adapter has prefixes of its own: nothing needs a flush."""
    sending = WEIGHT_SYNC.sending
    if sending is not None and sending.adapter:
        return sending.committed
    if sending is None or sending.committed is not None:
        return await flush()
    sending.send = time.perf_counter() - sending.began
    sending.committed = await end()
    return sending.committed


@patches.wrap(
    f"{ENGINE}.load_lora_adapter_from_tensor",
    relies_on=("req.serialized_named_tensors", "req.config_dict"),
    evidence="optional",  # a job may have no adapters
    why="verl posts an adapter again when it takes longer than 60 s, and takes a refusal for an error of the connection.",
    remove_when="verl's client knows which requests it may repeat.",
)
async def load_lora_adapter_from_tensor(original, self, req: Any) -> Any:
    """Post an adapter of a sync once, and keep the ranks' receipts; a refusal raises with the server's text.

    Raises PatchError, see `post`."""
    if WEIGHT_SYNC.sending is None:
        return await original(self, req)
    encoded = [base64.b64encode(part).decode() for part in req.serialized_named_tensors]
    return await send_adapter(
        self, req, {"serialized_named_tensors": encoded}, patches.of(load_lora_adapter_from_tensor).id
    )


async def send_adapter(client: Any, req: Any, tensors: dict[str, Any], patch: str) -> dict[str, Any]:
    """Post an adapter, its name and configuration ``req`` with ``tensors``, through verl's ``AsyncHttpServerAdapter``,
    asking again while requests run under the one before; keep and return the answer. Errors name ``patch``."""
    sending = WEIGHT_SYNC.sending
    fields = {"lora_name": req.lora_name, "config_dict": req.config_dict, "rid": sending.id, **tensors}
    sending.committed = await post_patiently(client, "load_lora_adapter_from_tensors", fields, patch)
    sending.send = time.perf_counter() - sending.began
    return sending.committed


@patches.wrap(
    f"{ENGINE}.unload_lora_adapter",
    evidence="optional",
    why="verl unloads an adapter before its successor has come; if that is refused, rollouts have none.",
    remove_when="SGLang replaces an adapter by itself.",
)
async def unload_lora_adapter(original, self, lora_name: str) -> Any:
    """Leave the old adapter in place within verl's update: the new one takes its name."""
    return await original(self, lora_name) if WEIGHT_SYNC.sending is None else {}


async def post_patiently(
    adapter: Any, endpoint: str, payload: dict[str, Any], patch: str = ""
) -> dict[str, Any]:
    """Do as `post`, asking again for `BUSY_SECONDS` while the server still has requests."""
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return await post(adapter, endpoint, payload, patch)
        except PatchError as error:
            if REQUESTS_RUN not in str(error) or time.monotonic() > end:
                raise
        await asyncio.sleep(0.1)


async def post(adapter: Any, endpoint: str, payload: dict[str, Any], patch: str = "") -> dict[str, Any]:
    """Post one request and return the JSON answer. verl's own client sends it again after 60 s.

    Args:
        adapter: verl's ``AsyncHttpServerAdapter``.
        endpoint, payload: the request.
        patch: id that errors name, if not that of `update_weights_from_tensor`.

    Raises:
        PatchError: the server refused, is gone, or did not answer within ``transfer_timeout`` seconds."""
    import aiohttp

    url = f"http://{adapter.server_args.host}:{adapter.server_args.port}/{endpoint}"
    limit = engine.options("fp8")["transfer_timeout"]
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=limit or None)) as session,
            session.post(url, json=payload) as response,
        ):
            if response.status < 400:
                return await response.json(content_type=None) or {}
            problem = f"refused {endpoint}:\n{_reason(await response.text())}\n"
    except asyncio.TimeoutError:
        problem = f"has not answered {endpoint} for {limit:g} s."
    except aiohttp.ClientError as error:
        problem = f"is gone: {endpoint} ended with {type(error).__name__}: {error}."
    raise PatchError(
        f"the rollout server at {url.rpartition('/')[0]} {problem}",
        patch=patch or patches.of(update_weights_from_tensor).id,
        advice="The trainer stops; the rollout server's log has the reason.",
    )


def _reason(body: str) -> str:
    try:
        told = json.loads(body)
        return str(told.get("message") or told["error_message"]).rstrip()
    except (ValueError, KeyError, TypeError, AttributeError):
        return body.rstrip()
