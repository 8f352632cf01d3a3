"""Run async-grpo's training core on stock verl: exact loss, routing by tokens, streaming batches, experts as the engine chose them."""

from __future__ import annotations

from functools import partial

from flashpatch.decorate import collected
from flashpatch.patches.grpo import verl_config
from flashpatch.patches.grpo.loss import policy_loss
from flashpatch.patches.grpo.replay import actor
from flashpatch.patches.grpo.routing import resubmit, router
from flashpatch.patches.grpo.streaming import mode, staleness
from flashpatch.record import Family, Option

_switch = partial(Option, kind=bool)
_number = partial(Option, kind=int, least=0)

FAMILY = Family(
    name="grpo",
    summary="GRPO loss that no split of the batch changes; routing by tokens; retries on lost servers; experts as the engine chose them",
    patches=collected(verl_config, policy_loss, router, resubmit, mode, staleness, actor),
    options={
        "loss": _switch(True, "set the loss mode grpo_exact if the configuration has verl's default"),
        "logprobs": _switch(
            False, "replace verl's fused log-probabilities (use_fused_kernels) by exact ones in blocks"
        ),
        "router": _switch(
            True, "route by outstanding tokens, unless the configuration has a router of its own"
        ),
        "longest_first": _switch(
            True,
            "serve the waiting request with the longest predicted response first, after one probe per unseen prompt; false: first come, first served",
        ),
        "resubmit": _switch(
            True, "repeat requests of a server that died, or that Ray cannot reach, on another one, once"
        ),
        "reference_every": _number(
            0, "stream_async: make the current policy the reference every N steps; 0: never"
        ),
        "max_staleness": _number(
            0,
            "stream_async: drop and replace a group with tokens older than this many policy versions; 0: no bound",
        ),
    },
    refuses=("verl.utils.config:validate_config",),
)
