"""Train a drafter step by step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashpatch.patches.eagle.train.drafter import Drafter
from flashpatch.patches.eagle.train.loss import step_sums
from flashpatch.patches.eagle.train.pack import Pack
from flashpatch.patches.eagle.train.settings import Recipe
from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

_BETAS = (0.9, 0.95)  # of AdamW, as EAGLE trains


class Trainer:
    """Train a drafter against a frozen head.

    Args:
        drafter: trained in place.
        target_embeddings: the target's embedding and head, on the drafter's device.
        recipe: see `Recipe`.

    Attributes:
        count: steps done.
        skipped: steps whose gradient was not finite, and which changed nothing."""

    def __init__(
        self, drafter: Drafter, target_embeddings: TargetEmbeddings, recipe: Recipe | None = None
    ) -> None:
        self.drafter, self.target_embeddings, self.recipe = drafter, target_embeddings, recipe or Recipe()
        self.count = self.skipped = 0
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=self.recipe.rate, betas=_BETAS, weight_decay=0.0
        )

    def step(self, rows: Sequence[Pack]) -> dict[str, float]:
        """Make one optimizer step over rows. Return means per position.

        The keys are ``loss``, ``states``, ``tokens``, ``agreement`` (positions where drafter and target have
        the same first choice), ``norm`` of the gradient before clipping and ``positions``; nothing happens,
        and positions is 0, when there is nothing to learn. ``loss`` is over all draft steps, the others are of
        the first; ``agreement_2`` and so on are those of later steps, if all drafts before were the target's."""
        self.optimizer.zero_grad(set_to_none=True)
        found = self.backward(rows)
        if not found["positions"]:
            return found
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.clip)
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
        recipe, steps = self.recipe, self.recipe.ttt_steps
        positions = [float(sum(int(row.learn_at(step).sum()) for row in rows)) for step in range(steps)]
        if not positions[0]:
            return {"positions": 0.0}
        totals = torch.zeros(steps, 3, device=parameter.device, dtype=torch.float64)
        shares = [recipe.ttt_decay**step if count else 0.0 for step, count in enumerate(positions)]
        weights = [share / sum(shares) for share in shares]
        for row in rows:
            row = row.to(parameter.device, parameter.dtype)
            parts = step_sums(self.drafter, self.target_embeddings, row, steps)
            losses = [
                (recipe.states * part.states + recipe.tokens * part.tokens) * (weight / max(1.0, count))
                for part, weight, count in zip(parts, weights, positions, strict=True)
            ]
            torch.stack(losses).sum().backward()
            totals += torch.stack([torch.stack(part).detach() for part in parts])
        counts = torch.tensor(positions, device=parameter.device).clamp(min=1.0)
        states, tokens, agreed = (totals / counts[:, None]).T.tolist()
        means = zip(weights, states, tokens, strict=True)
        return {
            "loss": sum(weight * (recipe.states * one + recipe.tokens * two) for weight, one, two in means),
            "states": states[0],
            "tokens": tokens[0],
            "positions": positions[0],
            **{f"agreement_{step}" if step > 1 else "agreement": one for step, one in enumerate(agreed, 1)},
        }

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights on the CPU."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.drafter.state_dict().items()}
