"""Train a drafter step by step, on one device or sharded over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flashpatch.patches.eagle.train.drafter import Drafter, Drafter3
from flashpatch.patches.eagle.train.loss import sums
from flashpatch.patches.eagle.train.pack import Pack, filler
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings


@dataclass(frozen=True)
class Recipe:
    """Hold the hyperparameters of drafter training.

    Attributes:
        rate: learning rate of AdamW.
        betas: of AdamW, as EAGLE trains.
        decay: weight decay.
        clip: largest norm of the gradient.
        states: weight of the SmoothL1 loss on states.
        tokens: weight of the soft cross entropy.
        compute: dtype of forward and backward under a mesh; parameters keep theirs.
    """

    rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.0
    clip: float = 0.5
    states: float = 1.0
    tokens: float = 0.1
    compute: torch.dtype = torch.float32


class Trainer:
    """Train a drafter against a frozen head.

    On a mesh all ranks call the same methods; each gives its own rows to `step`. The gradient is that of the
    mean over the positions of all ranks, however they are divided.

    Args:
        drafter: sharded in place when ``mesh`` is given.
        target_embeddings: the target's embedding and head, on the drafter's device.
        recipe: see `Recipe`.
        mesh: a device mesh of one dimension (FSDP2), or two (replicate, shard); None without sharding.

    Attributes:
        count: steps done.
        skipped: steps whose gradient was not finite, and which changed nothing.
    """

    def __init__(
        self,
        drafter: Drafter | Drafter3,
        target_embeddings: TargetEmbeddings,
        recipe: Recipe | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.drafter, self.target_embeddings, self.recipe, self.mesh = (
            drafter,
            target_embeddings,
            recipe or Recipe(),
            mesh,
        )
        self.count = self.skipped = 0
        if mesh is not None:
            policy = MixedPrecisionPolicy(param_dtype=self.recipe.compute, reduce_dtype=torch.float32)
            fully_shard(drafter, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=self.recipe.rate, betas=self.recipe.betas, weight_decay=self.recipe.decay
        )

    def step(self, rows: Sequence[Pack]) -> dict[str, float]:
        """Make one optimizer step over rows; a rank may have none. Return means per position over all ranks.

        The keys are ``loss``, ``states``, ``tokens``, ``agreement`` (positions where drafter and target have
        the same first choice), ``norm`` of the gradient before clipping and ``positions``; nothing happens,
        and positions is 0, when no rank has anything to learn.
        """
        self.optimizer.zero_grad(set_to_none=True)
        found = self.backward(rows)
        if not found["positions"]:
            return found
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found["norm"] = norm.item()
        self.count += 1
        if torch.isfinite(norm):
            self.optimizer.step()
        else:
            self.skipped += 1
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def backward(self, rows: Sequence[Pack]) -> dict[str, float]:
        """Compute gradients of the mean loss, without a step."""
        parameter = next(self.drafter.parameters())
        device, ranks = parameter.device, self.mesh.size() if self.mesh is not None else 1
        mine = torch.tensor(
            [float(sum(int(row.learn.sum()) for row in rows)), float(len(rows))], device=device
        )
        positions = self._over_ranks(mine[:1].clone()).item()
        number = int(self._over_ranks(mine[1:].clone(), dist.ReduceOp.MAX).item())
        totals = torch.zeros(3, device=device, dtype=torch.float64)
        if not positions:
            return {"positions": 0.0}
        rows = list(rows) + [filler(self.drafter.width, self.drafter.config.hidden_size)] * (
            number - len(rows)
        )
        dtype = self.recipe.compute if self.mesh is not None else parameter.dtype
        for place, row in enumerate(rows):
            if self.mesh is not None:
                self.drafter.set_requires_gradient_sync(place == len(rows) - 1)
            part = sums(self.drafter, self.target_embeddings, row.to(device, dtype))
            loss = self.recipe.states * part.states + self.recipe.tokens * part.tokens
            # FSDP takes the mean of the ranks' gradients; the sum is wanted.
            (loss * (ranks / positions)).backward()
            totals += torch.stack([part.states.detach(), part.tokens.detach(), part.agreed]).double()
        states, tokens, agreed = (self._over_ranks(totals) / positions).tolist()
        loss = self.recipe.states * states + self.recipe.tokens * tokens
        return {"loss": loss, "states": states, "tokens": tokens, "agreement": agreed, "positions": positions}

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Pack]) -> dict[str, float]:
        """Return the means of `step` for this rank's rows, without a step; not for sharded drafters."""
        parameter = next(self.drafter.parameters())
        found = [
            sums(self.drafter, self.target_embeddings, row.to(parameter.device, parameter.dtype))
            for row in rows
        ]
        count = max(1.0, float(sum(part.count for part in found)))
        names = {"states": "states", "tokens": "tokens", "agreed": "agreement"}
        return {key: float(sum(getattr(part, name) for part in found)) / count for name, key in names.items()}

    def weights(self) -> dict[str, Tensor]:
        """Return full weights on the CPU; on a mesh all ranks call it, and rank 0 gets them."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        found = get_model_state_dict(self.drafter, options=options)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load full weights, with a fresh optimizer; on a mesh all ranks give them."""
        set_model_state_dict(self.drafter, dict(weights), options=StateDictOptions(full_state_dict=True))
        self.optimizer.state.clear()

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs, for a distributed checkpoint; sharded where the drafter is."""
        model, optimizer = get_state_dict(self.drafter, self.optimizer)
        return {"model": model, "optimizer": optimizer, "count": torch.tensor([self.count, self.skipped])}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state` into whose tensors a checkpoint was read."""
        set_state_dict(
            self.drafter, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.count, self.skipped = state["count"].tolist()

    def _over_ranks(self, value: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.mesh is not None:
            for dimension in range(self.mesh.ndim):
                dist.all_reduce(value, how, group=self.mesh.get_group(dimension))
        return value
