"""One decision for all ranks of an engine.

Ranks measure their own times, so their bandits drift apart; ranks that run different arms wait in different
collectives for ever. So the first rank decides.
"""

from __future__ import annotations

from typing import Any

from flashpatch.errors import PatchError


class RankBroadcast:
    """The group's first rank decides and broadcasts; a decision costs one small collective on the host.

    All ranks must ask for the same steps in the same order, as tensor-parallel ranks do. Each checks that its
    step and batch size are the leader's.

    Args:
        group: a ``torch.distributed`` process group for CPU tensors (gloo); None for the default group.

    Raises:
        PatchError: torch.distributed is not initialised.
    """

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            raise PatchError(
                "torch.distributed is not initialised.",
                patch="eagle",
                target="broadcast",
                advice="Make the policy after the engine's process groups, or without broadcast on one rank.",
            )
        self._dist, self._group = dist, group
        self._source = dist.get_global_rank(group, 0) if group is not None else 0
        self._buffer = torch.empty(3, dtype=torch.int64)
        self.is_leader = dist.get_rank() == self._source

    def __call__(self, turn: int, batch_size: int, arm: int) -> int:
        """The leader's arm.

        Raises:
            PatchError: this rank is at another step or has another batch than the leader.
        """
        buffer = self._buffer
        if self.is_leader:
            buffer[0], buffer[1], buffer[2] = turn, batch_size, arm
        self._dist.broadcast(buffer, src=self._source, group=self._group)
        theirs = buffer.tolist()
        if theirs[:2] != [turn, batch_size]:
            raise PatchError(
                f"this rank is at step {turn} with batch {batch_size}, "
                f"the leader at {theirs[0]} with {theirs[1]}.",
                patch="eagle",
                target="broadcast",
                advice="Every rank has to ask the policy for the same steps.",
            )
        return theirs[2]
