"""Run async-grpo's training core on stock verl: exact loss, routing by tokens, streaming batches, experts as the engine chose them."""

from __future__ import annotations

from flashpatch.patches.grpo import verl_config
from flashpatch.patches.grpo.loss import batch_counts, fused_logprobs, policy_loss
from flashpatch.patches.grpo.replay import actor, sglang_record
from flashpatch.patches.grpo.routing import partial_outputs, resubmit, router
from flashpatch.patches.grpo.streaming import mode, token_versions
from flashpatch.record import Family, Option

FAMILY = Family(
    name="grpo",
    summary="GRPO loss that no split of the batch changes; routing by tokens; retries on lost servers; experts as the engine chose them",
    patches=(
        verl_config.PATCH,
        policy_loss.PATCH,
        batch_counts.PATCH,
        router.PATCH,
        router.INIT,
        resubmit.ACQUIRE,
        resubmit.GENERATE,
        resubmit.RELEASE,
        resubmit.REQUEST_ID,
        partial_outputs.SERVER_GENERATE,
        partial_outputs.ENGINE_GENERATE,
        fused_logprobs.PATCH,
        mode.PATCH,
        token_versions.PART,
        token_versions.WHOLE,
        *actor.PATCHES,
        sglang_record.PATCH,
    ),
    options={
        "loss": Option(
            True, "set the loss mode grpo_exact if the configuration has verl's default", kind=bool
        ),
        "logprobs": Option(
            False,
            "replace verl's fused log-probabilities (use_fused_kernels) by exact ones in blocks",
            kind=bool,
        ),
        "router": Option(
            True, "route by outstanding tokens, unless the configuration has a router of its own", kind=bool
        ),
        "worker_tokens": Option(
            0, "send a server no request above this many outstanding tokens; 0: no limit", kind=int, least=0
        ),
        "worker_requests": Option(
            0,
            "send a server no more outstanding requests than this; 0: a sixteenth above its max_num_seqs with longest_first, else no limit",
            kind=int,
            least=0,
        ),
        "affinity_slack": Option(
            0,
            "let a conversation's server have this many more outstanding tokens than the emptiest one; 0: no limit",
            kind=int,
            least=0,
        ),
        "response_tokens": Option(
            1024,
            "expect this many tokens of a response while nothing is known, at most its own limit",
            kind=int,
            least=0,
        ),
        "predict": Option(
            True,
            "predict lengths of responses from those to the same prompt that ended or still run",
            kind=bool,
        ),
        "longest_first": Option(
            True,
            "serve the waiting request with the longest predicted response first, after one probe per unseen prompt; false: first come, first served",
            kind=bool,
        ),
        "router_trace": Option("", "record the lengths of responses in this file; empty: nowhere", kind=str),
        "resubmit": Option(True, "repeat requests of a dead or slow server on another one, once", kind=bool),
        "journal": Option(
            0,
            "save a response every N tokens, so that it resumes there if its vLLM server dies; 0: restart from the prompt",
            kind=int,
            least=0,
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
        "reference_every": Option(
            0,
            "stream_async: make the current policy the reference every N steps; 0: never",
            kind=int,
            least=0,
        ),
        "max_staleness": Option(
            0,
            "stream_async: drop and replace a group with tokens older than this many policy versions; 0: no bound",
            kind=int,
            least=0,
        ),
        "replace_lost": Option(
            4,
            "stream_async: start at most this many lost servers and agent loop workers again in a row while nothing gets done; 0: none",
            kind=int,
            least=0,
        ),
        "rest": Option(30.0, "send a slow server no new requests for this many seconds", kind=float, least=0),
    },
    refuses=("verl.utils.config:validate_config",),
)
