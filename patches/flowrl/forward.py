"""Pass prompt offsets to the actor's forward; return log Z."""

from __future__ import annotations

import functools
from typing import Any

from flashpatch.patches.flowrl.actor import IMPL, capture
from flashpatch.record import Contract, Patch

LOG_Z = "log_z"


def on_inputs(original, self, micro_batch: Any) -> Any:
    """Record the prompts' offsets in ``FSDPEngineWithLMHead.prepare_model_inputs``."""
    import torch

    inputs = original(self, micro_batch)
    held = capture(self)
    if held is not None:
        sharers = self.ulysses_parallel_group if self.use_ulysses_sp else None
        held.prompts = locate(micro_batch, inputs[0], sharers) if torch.is_grad_enabled() else None
    return inputs


def locate(micro_batch: Any, model_inputs: Any, sharers: Any = None) -> Any:
    """Return the `partition_function.Prompts` of a micro-batch, by the lengths that verl splits by.

    Args:
        sharers: process group of the ranks that hold parts of the packed row, or None.

    Source: ``verl/workers/utils/padding.py: no_padding_2_padding``.
    """
    from flashpatch.patches.flowrl.partition_function import Prompts

    prompts, ids = micro_batch["prompts"], micro_batch["input_ids"]
    if prompts.is_nested:
        lengths = prompts.offsets().diff()
    else:
        lengths = micro_batch["attention_mask"][:, : prompts.shape[1]].sum(1)
    packed = model_inputs["attention_mask"] is None
    starts = ids.offsets()[:-1].to(lengths.device) if packed else None
    return Prompts(lengths.to(ids.device), starts if starts is None else starts.to(ids.device), sharers)


def on_outputs(original, self, output: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Pass log Z to the loss, ``(batch,)``, in ``FSDPEngineWithLMHead.prepare_model_outputs``."""
    import torch

    outputs = original(self, output, *args, **kwargs)
    if capture(self) is not None and torch.is_grad_enabled():
        outputs[LOG_Z] = output.loss
    return outputs


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    evidence="step",
    scope=frozenset({"trainer"}),
    why="log Z must be computed in the actor's own forward, which keeps only its last layer's output.",
    remove_when="verl has a partition function of its own.",
)

INPUTS = _patch(
    id="flowrl.verl.prepare_model_inputs",
    targets=(f"{IMPL}:FSDPEngineWithLMHead.prepare_model_inputs",),
    wrapper=on_inputs,
    contract=Contract(
        params=("self", "micro_batch"),
        mentions=("input_ids.offsets", "input_ids.values", "self.use_ulysses_sp"),
        exists=(
            "verl.workers.utils.padding:no_padding_2_padding",
            "verl.utils.ulysses:ulysses_pad_and_slice_inputs",
            f"{IMPL}:FSDPEngine._init_device_mesh",
        ),
    ),
    how="Records the prompts' offsets in the micro-batch, packed or padded, before a forward with gradient, and "
    "the ranks that hold parts of the same row.",
)

OUTPUTS = _patch(
    id="flowrl.verl.prepare_model_outputs",
    targets=(f"{IMPL}:FSDPEngineWithLMHead.prepare_model_outputs",),
    wrapper=on_outputs,
    contract=Contract(
        params=("self", "output", "output_args", "micro_batch"),
        mentions=("output.logits", "output.log_probs"),
        exists=(f"{IMPL}:FSDPEngineWithLMHead.forward_step",),
    ),
    how="Returns log Z in the output's unused field loss.",
)
