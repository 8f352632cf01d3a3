"""Make all ranks of an engine run the arm that the first one chooses.

Ranks measure their own times, so their bandits would choose differently; ranks that run different arms wait
in different collectives for ever."""

from __future__ import annotations

from typing import Any

from flashpatch.patches.eagle.errors import eagle_error


class RankBroadcast:
    """Broadcast the choice of the group's first rank; a choice costs one small collective on the host.

    All ranks must call it for the same steps in the same order, as tensor-parallel ranks do. Each checks that
    its step and batch size are the leader's.

    Args:
        group: a ``torch.distributed`` process group for CPU tensors (gloo); None for the default group."""

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self._source = dist.get_global_rank(group, 0) if group is not None else 0
        self._buffer = torch.empty(3, dtype=torch.int64)
        self.is_leader = dist.get_rank() == self._source

    def __call__(self, step: int, batch_size: int, arm: int) -> int:
        """Return the leader's arm. Raises PatchError if this rank is at another step or has another batch than the
        leader."""
        buffer = self._buffer
        if self.is_leader:
            buffer[0], buffer[1], buffer[2] = step, batch_size, arm
        self._dist.broadcast(buffer, src=self._source, group=self._group)
        leader = buffer.tolist()
        if leader[:2] != [step, batch_size]:
            raise eagle_error(
                "broadcast",
                f"this rank is at step {step} with batch {batch_size}, the leader at {leader[0]} with {leader[1]}.",
                "Call the policy for the same steps on every rank.",
            )
        return leader[2]
