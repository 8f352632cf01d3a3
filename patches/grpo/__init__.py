"""Run async-grpo's training core on stock verl: exact loss, routing by tokens, streaming batches, experts as the engine chose them."""

from __future__ import annotations

from functools import partial

from flashpatch.decorate import collected
from flashpatch.patches.grpo import verl_config
from flashpatch.patches.grpo.loss import policy_loss
from flashpatch.patches.grpo.replay import actor
from flashpatch.patches.grpo.routing import journal, resubmit, router
from flashpatch.patches.grpo.streaming import mode, staleness
from flashpatch.record import Family, Option

_switch = partial(Option, kind=bool)
_number = partial(Option, kind=int, least=0)

FAMILY = Family(
    name="grpo",
    summary="GRPO loss that no split of the batch changes; routing by tokens; retries on lost servers; experts as the engine chose them",
    patches=collected(verl_config, policy_loss, router, resubmit, journal, mode, staleness, actor),
    options={
        "loss": _switch(True, "set the loss mode grpo_exact if the configuration has verl's default"),
        "logprobs": _switch(
            False, "replace verl's fused log-probabilities (use_fused_kernels) by exact ones in blocks"
        ),
        "router": _switch(
            True, "route by outstanding tokens, unless the configuration has a router of its own"
        ),
        "worker_tokens": _number(
            0, "send a server no request above this many outstanding tokens; 0: no limit"
        ),
        "worker_requests": _number(
            0,
            "send a server no more outstanding requests than this; 0: a sixteenth above its max_num_seqs with longest_first, else no limit",
        ),
        "affinity_slack": _number(
            0,
            "let a conversation's server have this many more outstanding tokens than the emptiest one; 0: no limit",
        ),
        "response_tokens": _number(
            1024, "expect this many tokens of a response while nothing is known, at most its own limit"
        ),
        "predict": _switch(
            True, "predict lengths of responses from those to the same prompt that ended or still run"
        ),
        "longest_first": _switch(
            True,
            "serve the waiting request with the longest predicted response first, after one probe per unseen prompt; false: first come, first served",
        ),
        "router_trace": Option("", "record the lengths of responses in this file; empty: nowhere", kind=str),
        "resubmit": _switch(True, "repeat requests of a dead or slow server on another one, once"),
        "journal": _number(
            0,
            "save a response every N tokens, so that it resumes there if its vLLM server dies; 0: restart from the prompt",
        ),
        "slow_after": Option(
            0.0,
            "count a server as slow after this many seconds without an answer; 0: never",
            kind=float,
            least=0,
        ),
        "stream_eager": Option(
            0.5,
            "stream_async: give an idle trainer a round once it is filled to this share of its token budget; 1: full rounds only",
            kind=float,
            least=0,
            most=1,
        ),
        "reference_every": _number(
            0, "stream_async: make the current policy the reference every N steps; 0: never"
        ),
        "max_staleness": _number(
            0,
            "stream_async: drop and replace a group with tokens older than this many policy versions; 0: no bound",
        ),
        "replace_lost": _number(
            4,
            "stream_async: start at most this many lost servers and agent loop workers again in a row while nothing gets done; 0: none",
        ),
        "rest": Option(30.0, "send a slow server no new requests for this many seconds", kind=float, least=0),
    },
    refuses=("verl.utils.config:validate_config",),
)
