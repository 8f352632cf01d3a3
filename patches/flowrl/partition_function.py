"""Compute FlowRL's partition function log Z(x) within the actor's own forward pass.

Sources: FlowRL (arXiv 2509.15207), section 3: Z is learned from the prompt; its published code takes the mean
of the prompt's last hidden states through a small network. Imported once torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce

from flashpatch.errors import PatchError
from flashpatch.patches._shared.flow_names import HEAD

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PATCH = "flowrl.verl.build_module"


class PartitionFunction(nn.Module):
    """Map the mean hidden state of a prompt to log Z: ``(batch, hidden)`` to ``(batch,)``, in its own dtype.

    Args:
        hidden: width of the model.
        layers: linear layers; all but the last are followed by GELU, LayerNorm and dropout.
        dropout: its probability, in training only."""

    def __init__(self, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        inner = [
            part
            for _ in range(layers - 1)
            for part in (nn.Linear(hidden, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Dropout(dropout))
        ]
        self.net = nn.Sequential(*inner, nn.Linear(hidden, 1))

    def forward(self, means: torch.Tensor) -> torch.Tensor:
        return self.net(means.to(self.net[-1].weight.dtype)).squeeze(-1)


@dataclass(frozen=True)
class Prompts:
    """Locate the prompts of a micro-batch in the model's input.

    Attributes:
        lengths: tokens of each prompt, ``(batch,)``.
        starts: where each sequence starts in one packed row, ``(batch,)``; None for one padded row each,
            which starts with the prompt.
        sharers: the ranks that hold equal parts of one packed row, in order (Ulysses); None if each has all."""

    lengths: torch.Tensor
    starts: torch.Tensor | None
    sharers: ProcessGroup | None = None

    def mask(self, columns: int) -> torch.Tensor:
        """Return a mask with 1 for the tokens of each prompt, ``(batch, columns)``, with this rank's columns."""
        starts = torch.zeros_like(self.lengths) if self.starts is None else self.starts
        first = 0 if self.sharers is None else dist.get_rank(self.sharers) * columns
        at = torch.arange(first, first + columns, device=self.lengths.device)
        starts = starts.unsqueeze(1)
        return (at >= starts) & (at < starts + self.lengths.unsqueeze(1))

    def mean(self, hidden: torch.Tensor) -> torch.Tensor:
        """Average each prompt's hidden states.

        Args:
            hidden: ``(batch, columns, width)``, or ``(1, columns, width)`` for a packed row or this rank's
                part of it; padding at the end of a row does not count.

        Returns:
            ``(batch, width)``, at least float32, the same on all ranks that share a row. The hidden states
            are not copied.

        Raises:
            PatchError: the model's rows are not those of the micro-batch."""
        rows, columns, _ = hidden.shape
        wanted = len(self.lengths) if self.starts is None else 1
        if rows != wanted:
            raise PatchError(
                f"found hidden states of {rows} rows where {wanted} were expected.",
                patch=PATCH,
                advice="This model's last hidden state is not what FlowRL's partition function needs.",
            )
        lengths = self.lengths.clamp(min=1).unsqueeze(1).float()
        scale = torch.exp2(-torch.frexp(lengths).exponent)  # exact, and keeps sums in the range of fp16
        chosen = (self.mask(columns) * scale).to(hidden.dtype)
        sums = chosen @ hidden[0] if self.starts is not None else torch.bmm(chosen.unsqueeze(1), hidden)[:, 0]
        sums = sums.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.sharers is not None:
            sums = all_reduce(sums, group=self.sharers)
        return sums / (lengths * scale)


class Capture:
    """Run the partition function within one actor's forward pass.

    A hook on the backbone takes its last hidden state: no other layer's is kept and no second pass is needed. A hook on
    the module that FSDP wraps computes log Z from it, so that FSDP gathers the partition function's weights, and returns
    it in the output's field ``loss``, which verl does not use: FSDP looks for tensors in declared fields only.

    Attributes:
        prompts: where the prompts of the next forward pass are; None when log Z is not wanted."""

    def __init__(self, module: nn.Module, detach: bool) -> None:
        self.prompts: Prompts | None = None
        self._hidden: torch.Tensor | None = None
        self._detach = detach
        backbone = getattr(module, "base_model", module)
        if backbone is module:
            raise PatchError(
                f"cannot find the backbone of {type(module).__name__}.",
                patch=PATCH,
                advice="The model must be a causal language model of transformers.",
            )
        backbone.register_forward_hook(self._keep)
        module.register_forward_hook(self._compute)

    @property
    def wanted(self) -> bool:
        return self.prompts is not None and torch.is_grad_enabled()

    def _keep(self, backbone: nn.Module, arguments: Any, output: Any) -> None:
        if self.wanted:
            self._hidden = output[0]

    def _compute(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        if not self.wanted:
            return output
        prompts, hidden = self.prompts, self._hidden
        self.prompts = self._hidden = None
        if hidden is None or getattr(output, "loss", self) is not None:
            raise PatchError(
                f"cannot compute log Z in the forward pass of {type(module).__name__}: "
                + ("its backbone was not called." if hidden is None else "its output has a loss of its own."),
                patch=PATCH,
                advice="The model must be a causal language model of transformers, called without labels.",
            )
        means = prompts.mean(hidden)
        output["loss"] = getattr(module, HEAD)(means.detach() if self._detach else means)
        return output
