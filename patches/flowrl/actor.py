"""Train the partition function beside the policy in verl's FSDP engine: built, optimised and run with it."""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.checkpoint_shapes import fingerprint
from flashpatch.patches._shared.context import holding
from flashpatch.patches._shared.flow_names import FILE, FOLDER, HEAD, MODE, is_head
from flashpatch.patches._shared.prompt_lengths import prompt_lengths
from flashpatch.patches.flowrl import options
from flashpatch.patches.flowrl.options import LOG_Z

logger = logging.getLogger("flashpatch.flowrl")

WORKERS = "verl.workers.engine_workers"
IMPL = "verl.workers.engine.fsdp.transformer_impl"

BUILDING: ContextVar[bool] = ContextVar("flashpatch_flowrl_building", default=False)
"""Whether the engines made in this context belong to an actor that learns by FlowRL."""

_CAPTURE = "_flashpatch_flowrl"
"""The engine's attribute for its `partition_function.Capture`; read by `capture`."""

patches = Patches(
    "flowrl",
    "verl>=0.9",
    scope="trainer",
    evidence="install",
    remove_when="verl has a partition function of its own.",
)


@patches.wrap(
    f"{WORKERS}:ActorRolloutRefWorker.init_model",
    relies_on=(
        "self.role",
        "self.actor.reset",
        "self.ref.reset",
        "ref_config.engine",
        f"{WORKERS}:ActorRolloutRefWorker.update_actor",
    ),
    why="The engine that builds a model knows neither whether it is an actor's, nor its loss mode.",
)
def init_model(original, self) -> Any:
    """Give the engines that a worker with the actor's role builds a partition function; refuse one with another loss mode.

    Raises PatchError if the actor's loss mode is another one, or its strategy not FSDP."""
    if "actor" not in self.role:
        return original(self)
    actor = self.config.actor
    mode, strategy = actor.policy_loss.get("loss_mode"), actor.strategy
    if mode != MODE or strategy not in ("fsdp", "fsdp2"):
        raise PatchError(
            f"cannot train this actor: policy_loss.loss_mode={mode}, strategy={strategy}.",
            **patches.at(init_model),
            advice=f"Set loss_mode={MODE} and strategy fsdp or fsdp2 (the driver of verl's own trainer does "
            "the first by itself), or take flowrl out of FLASHPATCH.",
        )
    ledger.role("trainer", rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)))
    with holding(BUILDING, True):
        return original(self)


@patches.wrap(
    f"{IMPL}:FSDPEngine._build_module",
    relies_on=(
        "self.engine_config.forward_only",
        "module.to",
        f"{IMPL}:FSDPEngine._build_model_optimizer",
        f"{IMPL}:FSDPEngine._build_fsdp_module",
        "verl.utils.fsdp_utils:get_fsdp_wrap_policy",
        "verl.utils.fsdp_utils:apply_fsdp2",
    ),
    why="The partition function must exist before FSDP wraps the model, to be sharded and saved with it.",
)
def build_module(original, self) -> Any:
    """Add the partition function to the actor's module as proj_z, in the actor's dtype, as an FSDP unit of its own; a
    reference gets none."""
    module = original(self)
    if BUILDING.get() and not self.engine_config.forward_only and options.current().log_z == "learned":
        attach(self, module)
    return module


def attach(engine: Any, module: Any) -> None:
    """Attach a partition function to ``module``, equal on all ranks.

    Its weights are those beside the model (``flowrl/proj_z.safetensors``), if there are any, else fresh and drawn from
    the engine's seed, without touching the process's random numbers. Raises PatchError if the model or engine is not
    supported, or the weights beside the model do not fit."""
    import torch

    from flashpatch.patches.flowrl.partition_function import Capture, PartitionFunction

    chosen = options.current()
    unsupported = [
        name
        for name, found in (
            ("a value model", engine.model_config.model_type != "language_model"),
            ("QAT", engine._qat_enabled),
            (f"a module called {HEAD}", hasattr(module, HEAD)),
        )
        if found
    ]
    if unsupported:
        raise PatchError(
            f"does not support {', '.join(unsupported)}.",
            **patches.at(build_module),
            advice="Change that, or take flowrl out of FLASHPATCH.",
        )
    width = module.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(engine.engine_config.seed)
        head = PartitionFunction(width, chosen.num_layers, chosen.dropout)
    _restore(head, Path(engine.model_config.local_path) / FOLDER / FILE)
    module.add_module(HEAD, head.to(module.dtype))
    # A unit of its own for FSDP, like a layer: its optimizer state then has a place of its own too, and a
    # checkpoint's other units stay as they are. Ignored when the configuration names units.
    module._no_split_modules = [*(module._no_split_modules or ()), type(head).__name__]
    setattr(engine, _CAPTURE, Capture(module, chosen.detach_hidden))


def _restore(head: Any, file: Path) -> None:
    if not file.exists():
        return
    from safetensors import safe_open

    try:
        with safe_open(file, "pt") as saved:
            if (saved.metadata() or {}).get("model") != fingerprint(file.parent.parent):
                raise RuntimeError("it was not saved beside this model")
            head.load_state_dict({name: saved.get_tensor(name) for name in saved.keys()})
    except RuntimeError as error:
        raise PatchError(
            f"cannot take the partition function from {file}: {error}.",
            **patches.at(build_module),
            advice="Set num_layers as it was, or move the file away to start from initial weights.",
        ) from error
    logger.warning("the partition function is loaded from %s", file)


@patches.wrap(
    f"{IMPL}:FSDPEngine._build_lora_module",
    relies_on=("get_peft_model", "PeftModel.from_pretrained"),
    evidence="optional",
    why="peft freezes all weights but its adapters, the partition function's too, and target_modules=all-linear "
    "gives it adapters.",
)
def build_lora_module(original, self, module: Any) -> Any:
    """Take proj_z out of the model while verl adds adapters, and put it back; all of its weights are trained."""
    head = getattr(module, HEAD, None)
    if head is None:
        return original(self, module)
    delattr(module, HEAD)
    try:
        return original(self, module)
    finally:
        module.add_module(HEAD, head)  # within the model that peft wraps now


@patches.wrap(
    f"{IMPL}:FSDPEngine._build_optimizer",
    relies_on=("module.parameters", "build_optimizer", "verl.workers.config.optimizer:build_optimizer"),
    why="The partition function is not pretrained and may need another learning rate than the policy.",
)
def build_optimizer(original, self, module: Any) -> Any:
    """Give verl's optimizer two parameter groups, the policy's and the partition function's.

    Raises PatchError if it has rates of its own, and FSDP flattened it together with other weights."""
    if capture(self) is None:
        return original(self, module)
    chosen = options.current()
    own = {name: vars(chosen)[name] for name in ("lr", "weight_decay") if vars(chosen)[name] is not None}
    named = list(module.named_parameters())
    head = [parameter for name, parameter in named if is_head(name)]
    if not head and own:
        raise PatchError(
            f"cannot give the partition function its own {' and '.join(own)}: FSDP flattened it together with other weights.",
            **patches.at(build_optimizer),
            advice="Add PartitionFunction to fsdp_config.wrap_policy.transformer_layer_cls_to_wrap, set "
            "use_orig_params=True, or unset these options.",
        )
    if not head:
        return original(self, module)
    rest = [parameter for name, parameter in named if not is_head(name)]
    return original(self, _Grouped({"params": rest}, {"params": head, **own}))


class _Grouped:
    """Stand in for a module of which verl reads the parameters alone; they come in groups."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self._groups = list(groups)

    def parameters(self) -> list[dict[str, Any]]:
        return self._groups


@patches.wrap(
    f"{IMPL}:FSDPEngineWithLMHead.prepare_model_inputs",
    relies_on=(
        "input_ids.offsets",
        "input_ids.values",
        "self.use_ulysses_sp",
        "verl.workers.utils.padding:no_padding_2_padding",
        "verl.utils.ulysses:ulysses_pad_and_slice_inputs",
        f"{IMPL}:FSDPEngine._init_device_mesh",
    ),
    evidence="step",
    why="log Z must be computed in the actor's own forward, which keeps only its last layer's output.",
)
def prepare_model_inputs(original, self, micro_batch: Any) -> Any:
    """Tell the partition function where the prompts of a micro-batch are, packed or padded, if the forward has gradient."""
    import torch

    inputs = original(self, micro_batch)
    held = capture(self)
    if held is not None:
        sharers = self.ulysses_parallel_group if self.use_ulysses_sp else None
        held.prompts = locate(micro_batch, inputs[0], sharers) if torch.is_grad_enabled() else None
    return inputs


def locate(micro_batch: Any, model_inputs: Any, sharers: Any = None) -> Any:
    """Return the `partition_function.Prompts` of a micro-batch. ``sharers``: process group of the ranks that hold parts of
    the packed row, or None."""
    from flashpatch.patches.flowrl.partition_function import Prompts

    lengths, ids = prompt_lengths(micro_batch), micro_batch["input_ids"]
    packed = model_inputs["attention_mask"] is None
    starts = ids.offsets()[:-1].to(lengths.device) if packed else None
    return Prompts(lengths.to(ids.device), starts if starts is None else starts.to(ids.device), sharers)


@patches.wrap(
    f"{IMPL}:FSDPEngineWithLMHead.prepare_model_outputs",
    relies_on=("output.logits", "output.log_probs", f"{IMPL}:FSDPEngineWithLMHead.forward_step"),
    params=("self", "output", "output_args", "micro_batch"),
    evidence="step",
    why="verl's loss gets what this returns, and log Z is not among it.",
)
def prepare_model_outputs(original, self, output: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Add log Z, (batch,), to the outputs; the partition function left it in the model output's unused field loss."""
    import torch

    outputs = original(self, output, *args, **kwargs)
    if capture(self) is not None and torch.is_grad_enabled():
        outputs[LOG_Z] = output.loss
    return outputs


def capture(engine: Any) -> Any:
    """Return the `partition_function.Capture` of an engine, or None for one without partition function."""
    return vars(engine).get(_CAPTURE)
