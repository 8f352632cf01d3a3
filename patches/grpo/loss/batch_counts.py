"""The numbers that verl divides a training batch's loss by become those of the samples that are really
there."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch

ID = "grpo.verl.prepare_micro_batches"
TARGET = "verl.workers.engine.utils:prepare_micro_batches"

_last: Any = None
"""The `Counts` last written into a batch of this process; None before the first."""


def last() -> Any:
    """Hold the counts that this process last wrote into a training batch, by which the loss divides."""
    return _last


def on_split(original, data: Any, dp_group: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Count the mini-batch in ``prepare_micro_batches``, where it is not divided into micro-batches yet.

    A training batch of PPO carries ``global_batch_size``, the configured number of samples, and
    ``batch_num_tokens``. Both are counted anew over all data-parallel ranks, from the mask that the loss
    uses. Batches without these fields (inference, supervised training) pass as they are.
    """
    global _last
    if "global_batch_size" in data.keys() and "response_mask" in data.keys():
        from verl.utils import tensordict_utils as tu

        from flashpatch.patches.grpo.loss.grpo_exact import count

        configured = tu.get_non_tensor_data(data, key="global_batch_size", default=None)
        if configured is not None:
            _last = count(data["response_mask"], dp_group)
            tu.assign_non_tensor(data, global_batch_size=max(_last.samples, 1))
            tu.assign_non_tensor(data, batch_num_tokens=max(_last.tokens, 1))
    return original(data, dp_group, *args, **kwargs)


def native(site: Any) -> str | None:
    """Name verl's own count if it is right for a batch of two samples of which one is masked out."""
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    batch = TensorDict({"response_mask": torch.tensor([[1, 1], [0, 0]])}, batch_size=2)
    tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, global_batch_size=2)
    (whole,), _ = site.original(batch)
    return "verl counts samples itself" if whole["global_batch_size"] == 1 else None


PATCH = Patch(
    id=ID,
    targets=(TARGET,),
    requires="verl>=0.9",
    wrapper=on_split,
    native=native,
    contract=Contract(
        params=("data", "dp_group"),
        exists=(
            "verl.utils.tensordict_utils:assign_non_tensor",
            "verl.utils.tensordict_utils:get_non_tensor_data",
            "verl.workers.utils.losses:ppo_loss",
        ),
    ),
    evidence="step",
    scope=frozenset({"trainer"}),
    why="verl divides the sequence-mean losses by the configured batch size. Padding samples, failed groups "
    "and samples that rejection took out are not in the sum but in the divisor, so the gradient shrinks "
    "with them; the number of tokens is counted from the mask before rejection.",
    how="Counts samples and tokens of every mini-batch over all data-parallel ranks, from the mask that the "
    "loss uses, and writes them where verl's losses read them. Actor and critic are both served.",
    remove_when="verl counts the samples of a mini-batch as it counts its tokens, and both after rejection.",
)
