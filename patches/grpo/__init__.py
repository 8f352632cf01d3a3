"""Run async-grpo's training core on stock verl: exact loss, routing by tokens, streaming batches."""

from __future__ import annotations

from flashpatch.patches.grpo import verl_config
from flashpatch.patches.grpo.loss import batch_counts, fused_logprobs, policy_loss
from flashpatch.patches.grpo.routing import partial_outputs, resubmit, router
from flashpatch.patches.grpo.streaming import mode, token_versions
from flashpatch.record import Family, Option

FAMILY = Family(
    name="grpo",
    summary="GRPO loss that no split of the batch changes; routing by tokens; retries on lost servers",
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
    ),
    options={
        "loss": Option(
            True, "set the loss mode grpo_exact where the configuration has verl's default", kind=bool
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
            0, "outstanding tokens above which a server gets no request; 0: no limit", kind=int, least=0
        ),
        "worker_requests": Option(
            0,
            "outstanding requests at which a server gets no more; 0: a sixteenth above its max_num_seqs with "
            "longest_first, else no limit",
            kind=int,
            least=0,
        ),
        "affinity_slack": Option(
            0,
            "outstanding tokens that a conversation's server may have above the emptiest one's; 0: no limit",
            kind=int,
            least=0,
        ),
        "response_tokens": Option(
            1024,
            "expected tokens of a response while nothing is known, at most its own limit",
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
            "of the requests that wait for a server, the longest predicted one is next, after one per new prompt; "
            "false: first come, first served",
            kind=bool,
        ),
        "engine_metrics": Option(
            0.0,
            "seconds between two looks of the router at the engines' own metrics; 0: it does not look",
            kind=float,
            least=0,
        ),
        "router_trace": Option(
            "", "file in which the router records the lengths of responses; empty: none", kind=str
        ),
        "resubmit": Option(True, "repeat requests of a dead or slow server on another one, once", kind=bool),
        "journal": Option(
            0,
            "tokens of a response after which its vLLM server reports them to an actor outside; a request of a lost "
            "server goes on after them. 0: it begins again from its prompt",
            kind=int,
            least=0,
        ),
        "patience": Option(
            0.0,
            "seconds without an answer after which a server counts as slow; 0: never",
            kind=float,
            least=0,
        ),
        "stream_eager": Option(
            0.5,
            "trainer mode stream_async: an idle trainer gets a round filled to this share of its token budget",
            kind=float,
            least=0,
            most=1,
        ),
        "reference_every": Option(
            0,
            "trainer mode stream_async: steps after which the reference becomes the current policy; 0: never",
            kind=int,
            least=0,
        ),
        "max_staleness": Option(
            0,
            "trainer mode stream_async: versions after which a token's group is dropped and replaced; 0: no bound",
            kind=int,
            least=0,
        ),
        "replace_lost": Option(
            4,
            "trainer mode stream_async: rollout servers, and agent loop workers, that are started again in a row while "
            "nothing gets done; 0: none",
            kind=int,
            least=0,
        ),
        "rest": Option(30.0, "seconds for which a slow server gets no new requests", kind=float, least=0),
    },
    refuses=("verl.utils.config:validate_config",),
)
