"""Attach the partition function to the actor before FSDP wraps it, as a parameter group of its own."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.errors import PatchError
from flashpatch.patches._shared.flow_names import FILE, FOLDER, HEAD, MODE, is_head
from flashpatch.patches.flowrl import options
from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.flowrl")

WORKERS = "verl.workers.engine_workers"
IMPL = "verl.workers.engine.fsdp.transformer_impl"

_building: ContextVar[bool] = ContextVar("flashpatch_flowrl_building", default=False)
"""Whether the engines made in this context belong to an actor that learns by FlowRL."""

_CAPTURE = "_flashpatch_flowrl"


def capture(engine: Any) -> Any:
    """Return the `partition_function.Capture` of an engine, or None for one without partition function."""
    return vars(engine).get(_CAPTURE)


@contextmanager
def building() -> Iterator[None]:
    """Give a partition function to language-model engines that train and are built inside the block."""
    token = _building.set(True)
    try:
        yield
    finally:
        _building.reset(token)


def on_init_model(original, self) -> Any:
    """Give the actor's engines a partition function while ``ActorRolloutRefWorker.init_model`` builds them.

    Raises:
        PatchError: the actor's loss mode is another one, or its strategy not FSDP.
    """
    if "actor" not in self.role:
        return original(self)
    actor = self.config.actor
    mode, strategy = actor.policy_loss.get("loss_mode"), actor.strategy
    if mode != MODE or strategy not in ("fsdp", "fsdp2"):
        raise PatchError(
            f"cannot train this actor: policy_loss.loss_mode={mode}, strategy={strategy}.",
            patch=INIT.id,
            target=INIT.targets[0],
            advice=f"Set loss_mode={MODE} and strategy fsdp or fsdp2 (the driver of verl's own trainer does "
            "the first by itself), or take flowrl out of FLASHPATCH.",
        )
    ledger.role("trainer", rank=int(os.environ.get("RANK", 0)), world=int(os.environ.get("WORLD_SIZE", 1)))
    with building():
        return original(self)


def on_build_module(original, self) -> Any:
    """Attach the partition function to an actor, not a reference, in ``FSDPEngine._build_module``."""
    module = original(self)
    if _building.get() and not self.engine_config.forward_only and options.current().log_z == "learned":
        attach(self, module)
    return module


def attach(engine: Any, module: Any) -> None:
    """Attach a partition function to ``module``, equal on all ranks.

    Its weights are those beside the model (``flowrl/proj_z.safetensors``), if there are any, else fresh and
    drawn from the engine's seed, without touching the process's random numbers.

    Raises:
        PatchError: the model or engine is not supported, or the weights beside the model do not fit.
    """
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
            patch=BUILD.id,
            target=BUILD.targets[0],
            advice="Change that, or take flowrl out of FLASHPATCH.",
        )
    width = module.config.get_text_config().hidden_size
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(engine.engine_config.seed)
        head = PartitionFunction(width, chosen.num_layers, chosen.dropout)
    _restore(head, Path(engine.model_config.local_path) / FOLDER / FILE)
    module.add_module(HEAD, head.to(module.dtype))
    # A unit of its own for FSDP, like a layer: its optimizer state then has a place of its own too, and a
    # checkpoint from before FlowRL still fits the rest. Ignored when the configuration names units.
    module._no_split_modules = [*(module._no_split_modules or ()), type(head).__name__]
    setattr(engine, _CAPTURE, Capture(module, chosen.detach_hidden))


def on_build_lora_module(original, self, module: Any) -> Any:
    """Keep the partition function out of ``FSDPEngine._build_lora_module``, which would freeze it and give it adapters."""
    head = getattr(module, HEAD, None)
    if head is None:
        return original(self, module)
    delattr(module, HEAD)
    try:
        return original(self, module)
    finally:
        module.add_module(HEAD, head)  # within the model that peft wraps now


def _restore(head: Any, file: Path) -> None:
    if not file.exists():
        return
    from safetensors.torch import load_file

    try:
        head.load_state_dict(load_file(file))
    except RuntimeError as error:
        raise PatchError(
            f"cannot take the partition function from {file}: {error}.",
            patch=BUILD.id,
            target=BUILD.targets[0],
            advice="Set num_layers as it was, or move the file away to start from initial weights.",
        ) from error
    logger.warning("the partition function is loaded from %s", file)


class _Grouped:
    """Stand in for a module whose parameters only are read, and return them in groups."""

    def __init__(self, *groups: dict[str, Any]) -> None:
        self._groups = list(groups)

    def parameters(self) -> list[dict[str, Any]]:
        return self._groups


def on_build_optimizer(original, self, module: Any) -> Any:
    """Make the partition function a second parameter group in ``FSDPEngine._build_optimizer``.

    Raises:
        PatchError: it has rates of its own, and FSDP flattened it together with other weights.
    """
    if capture(self) is None:
        return original(self, module)
    chosen = options.current()
    own = {
        name: value
        for name, value in (("lr", chosen.lr), ("weight_decay", chosen.weight_decay))
        if value is not None
    }
    named = list(module.named_parameters())
    head = [parameter for name, parameter in named if is_head(name)]
    if not head and own:
        raise PatchError(
            f"cannot give the partition function its own {' and '.join(own)}: FSDP flattened it together "
            "with other weights.",
            patch=OPTIMIZER.id,
            target=OPTIMIZER.targets[0],
            advice="Add PartitionFunction to fsdp_config.wrap_policy.transformer_layer_cls_to_wrap, set "
            "use_orig_params=True, or unset these options.",
        )
    if not head:
        return original(self, module)
    rest = [parameter for name, parameter in named if not is_head(name)]
    return original(self, _Grouped({"params": rest}, {"params": head, **own}))


_patch = functools.partial(
    Patch,
    requires="verl>=0.9",
    evidence="install",
    scope=frozenset({"trainer"}),
    remove_when="verl has a partition function of its own.",
)

INIT = _patch(
    id="flowrl.verl.init_model",
    targets=(f"{WORKERS}:ActorRolloutRefWorker.init_model",),
    wrapper=on_init_model,
    contract=Contract(
        params=("self",),
        mentions=("self.role", "self.actor.reset", "self.ref.reset", "ref_config.engine"),
        exists=(f"{WORKERS}:ActorRolloutRefWorker.update_actor",),
    ),
    why="The engine that builds a model knows neither whether it is an actor's, nor its loss mode.",
    how="While a worker with the actor's role builds its engines, those that train get a partition function; "
    "a worker with another loss mode is refused.",
)

BUILD = _patch(
    id="flowrl.verl.build_module",
    targets=(f"{IMPL}:FSDPEngine._build_module",),
    wrapper=on_build_module,
    contract=Contract(
        params=("self",),
        mentions=("self.engine_config.forward_only", "module.to"),
        exists=(
            f"{IMPL}:FSDPEngine._build_model_optimizer",
            f"{IMPL}:FSDPEngine._build_fsdp_module",
            "verl.utils.fsdp_utils:get_fsdp_wrap_policy",
            "verl.utils.fsdp_utils:apply_fsdp2",
        ),
    ),
    why="The partition function must exist before FSDP wraps the model, to be sharded and saved with it.",
    how="Adds proj_z to the actor's module, in the actor's dtype, as an FSDP unit of its own.",
)

LORA = _patch(
    id="flowrl.verl.build_lora_module",
    targets=(f"{IMPL}:FSDPEngine._build_lora_module",),
    wrapper=on_build_lora_module,
    evidence="optional",
    contract=Contract(
        params=("self", "module"),
        mentions=("get_peft_model", "PeftModel.from_pretrained"),
    ),
    why="peft freezes all weights but its adapters, the partition function's too, and target_modules=all-linear "
    "gives it adapters.",
    how="Takes proj_z out of the model while verl adds adapters, and puts it back, trained as a whole.",
)

OPTIMIZER = _patch(
    id="flowrl.verl.build_optimizer",
    targets=(f"{IMPL}:FSDPEngine._build_optimizer",),
    wrapper=on_build_optimizer,
    contract=Contract(
        params=("self", "module"),
        mentions=("module.parameters", "build_optimizer"),
        exists=("verl.workers.config.optimizer:build_optimizer",),
    ),
    why="The partition function is not pretrained and may need another learning rate than the policy.",
    how="Gives verl's optimizer two parameter groups, the policy's and the partition function's.",
)
