"""Let the ``weight_version`` of SGLang 0.5.12 move when an update is committed, not with its first bucket."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from flashpatch.patches._shared import sglang_sessions
from flashpatch.patches.fp8.sglang_0_5_12.record import FRAMEWORK, for_old_sglang
from flashpatch.record import Contract

TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"

_held: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


async def on_update(original, self, obj: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Around ``update_weights_from_tensor`` and ``update_weights_from_distributed``.

    The scheduler does not look at the version: it is the tokenizer's process that stamps answers.
    """
    version, obj.weight_version = obj.weight_version, None
    done, message = await original(self, obj, *args, **kwargs)
    if sglang_sessions.sync_of(obj.load_format) is not None or not done:
        _held.pop(self, None)
    elif sglang_sessions.OPEN in message:
        if version is not None:
            _held[self] = version
    else:
        version = version if version is not None else _held.get(self)
        _held.pop(self, None)
        if version is not None:
            self._update_weight_version_if_provided(version)
            message += f" Weight version updated to {version}."
    return done, message


_patch = partial(
    for_old_sglang,
    evidence="optional",
    scope=frozenset({"driver"}),
    wrapper=on_update,
    contract=Contract(
        params=("obj",), mentions=("obj.weight_version", "self._update_weight_version_if_provided")
    ),
    why="SGLang stamps answers with the version of the first bucket, while the old policy still answers or the update may fail.",
    how="Holds the version back until the answer says that the update is committed.",
)

TENSOR = _patch(
    id=f"{FRAMEWORK}.tokenizer_update_weights_from_tensor",
    targets=(f"{TOKENIZER}.update_weights_from_tensor",),
    when=f"anywhere={FRAMEWORK}.update_weights_from_tensor",
    needs=(f"{FRAMEWORK}.update_weights_from_tensor",),
)

DISTRIBUTED = _patch(
    id=f"{FRAMEWORK}.tokenizer_update_weights_from_distributed",
    targets=(f"{TOKENIZER}.update_weights_from_distributed",),
    when=f"anywhere={FRAMEWORK}.update_weights_from_distributed",
    needs=(f"{FRAMEWORK}.update_weights_from_distributed",),
)
