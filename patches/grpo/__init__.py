"""async-grpo's training core on stock verl: exact loss, token-cost routing, streaming batches."""

from __future__ import annotations

from pathlib import Path

from flashpatch.patches.grpo import counting, policy_loss
from flashpatch.proof import Proof
from flashpatch.record import Family


def _probe(nonce: str, workdir: Path) -> list[Proof]:
    from flashpatch.patches.grpo.probe import probe

    return probe(nonce, workdir)


FAMILY = Family(
    name="grpo",
    summary="a GRPO loss that no split changes, routing by token cost, and batches as samples arrive",
    patches=(counting.PATCH, policy_loss.PATCH),
    probe=_probe,
)
