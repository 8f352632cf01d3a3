"""Let SGLang's ``weight_version`` move when an update is committed, not with its first bucket.

SGLang takes the version that a bucket names as that of the weights in place. Buckets are staged: what answers until
``end_weight_update`` is the old policy, or nothing.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from flashpatch.patches.fp8.refit import model_registry
from flashpatch.patches.fp8.sglang.schedulers import MANAGER
from flashpatch.patches.fp8.sglang.session import AGAIN
from flashpatch.record import Contract, Patch

TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin"

# Object that keeps the version in its process, the scheduler's or the tokenizer's, to the version that the open update brings.
_held: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def on_record(original, self, weight_version: str | None):
    """Around the scheduler's ``record_weight_version_after_update``."""
    if any(owner.state == "open" for owner in model_registry.all_models()):
        if weight_version is not None:
            _held[self.scheduler] = weight_version
        return
    original(self, weight_version)


def settle(manager: Any, committed: bool) -> None:
    """End the update: record the version that was held back if it was committed, else forget it."""
    version = _held.pop(manager.scheduler, None)
    if committed and version is not None:
        manager.record_weight_version_after_update(version)


def on_provided(original, self, weight_version: str | None):
    """Around the tokenizer's ``_update_weight_version_if_provided``."""
    if self not in _held:
        return original(self, weight_version)
    if weight_version is not None:
        _held[self] = weight_version


async def on_begin(original, self, *args: Any, **kwargs: Any):
    """Around the tokenizer's ``begin_weight_update``: hold versions back from here on."""
    done, message = await original(self, *args, **kwargs)
    if done:
        _held[self] = None
    return done, message


async def on_end(original, self, *args: Any, **kwargs: Any):
    """Around the tokenizer's ``end_weight_update``."""
    done, message = await original(self, *args, **kwargs)
    if done or AGAIN not in message:
        version = _held.pop(self, None)
        if done:
            self._update_weight_version_if_provided(version)
    return done, message


_patch = partial(
    Patch,
    requires="sglang>=0.5.21",
    evidence="optional",  # an update may come from disk, which has no session
    needs=("fp8.sglang.end_weight_update",),
    why="SGLang stamps answers with the version of the first bucket, while the old policy still answers or the update may fail.",
    remove_when="SGLang itself records the version when a session ends.",
)
_driver = partial(_patch, scope=frozenset({"driver"}))

RECORD = _patch(
    id="fp8.sglang.record_weight_version_after_update",
    targets=(f"{MANAGER}.record_weight_version_after_update",),
    wrapper=on_record,
    scope=frozenset({"engine-core"}),
    contract=Contract(params=("weight_version",), mentions=("self.scheduler",)),
    how="Holds the version back while an update is open, and records it after the commit.",
)

PROVIDED = _driver(
    id="fp8.sglang.update_weight_version_if_provided",
    targets=(f"{TOKENIZER}._update_weight_version_if_provided",),
    wrapper=on_provided,
    contract=Contract(params=("weight_version",)),
    how="Holds the version back while a session is open.",
)

BEGIN = _driver(
    id="fp8.sglang.tokenizer_begin_weight_update",
    targets=(f"{TOKENIZER}.begin_weight_update",),
    wrapper=on_begin,
    contract=Contract(params=("obj",)),
    how="Notes that a session is open.",
)

END = _driver(
    id="fp8.sglang.tokenizer_end_weight_update",
    targets=(f"{TOKENIZER}.end_weight_update",),
    wrapper=on_end,
    contract=Contract(params=("obj",)),
    how="Takes the version that was held back if the session was committed.",
)
