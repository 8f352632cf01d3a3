"""async-grpo's training core on stock verl: exact loss, token-cost routing, streaming batches."""

from __future__ import annotations

from pathlib import Path

from flashpatch.patches.grpo import complete, verl_config
from flashpatch.patches.grpo.loss.grpo_exact import batch_counts, fused_logprobs, policy_loss
from flashpatch.patches.grpo.routing import resubmit, router
from flashpatch.proof import Proof
from flashpatch.record import Family, Option


def _probe(nonce: str, workdir: Path) -> list[Proof]:
    from flashpatch.verify.probes.grpo.probe import probe

    return probe(nonce, workdir)


FAMILY = Family(
    name="grpo",
    summary="a GRPO loss that no split changes, routing by token cost, and batches as samples arrive",
    patches=(
        verl_config.PATCH,
        policy_loss.PATCH,
        batch_counts.PATCH,
        router.PATCH,
        resubmit.ACQUIRE,
        resubmit.GENERATE,
        fused_logprobs.PATCH,
        complete.PATCH,
    ),
    options={
        "loss": Option(True, "set the loss mode grpo_exact where a recipe has verl's default", kind=bool),
        "logprobs": Option(
            False, "replace verl's fused log-probabilities (use_fused_kernels) by ours", kind=bool
        ),
        "router": Option(
            True, "route by outstanding tokens, unless a recipe has a router of its own", kind=bool
        ),
        "worker_tokens": Option(
            0, "outstanding tokens above which a server gets no request; 0: any", kind=int
        ),
        "worker_requests": Option(0, "outstanding requests at which a server gets no more; 0: any", kind=int),
        "affinity_slack": Option(
            0, "tokens by which a conversation's server may be fuller; 0: any", kind=int
        ),
        "response_tokens": Option(1024, "tokens to expect of a response, at most its limit", kind=int),
        "resubmit": Option(True, "give requests of a dead or slow server to another one, once", kind=bool),
        "patience": Option(0.0, "seconds after which a server counts as slow; 0: never", kind=float),
        "rest": Option(30.0, "seconds without new requests for a slow server", kind=float),
    },
    refuses=("verl.utils.config:validate_config",),
    probe=_probe,
)
