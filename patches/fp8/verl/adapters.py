"""Send LoRA adapters to rollouts in processes of their own, for which verl sends the base alone.

A checkpoint engine carries names and tensors alone, so the adapter's configuration travels as a tensor of bytes whose name
is no parameter's: one before the base, one before the adapter. They cut the stream into the calls of
``ServerAdapter.update_weights`` that verl makes itself if trainer and rollout share a process."""

from __future__ import annotations

import itertools
import json
import re
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flashpatch import ledger
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.verl.transfer.weight_sync import relayed
from flashpatch.record import Patch

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]

WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
MARK = "__flashpatch_adapter__"
_ALIGN = 512  # bytes: what is packed behind a mark stays aligned

_based: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainer workers that have sent the base, and clients whose engine has got the one that its adapters belong to."""

patches = Patches("fp8", "verl>=0.9", evidence="optional", scope="trainer")


@patches.wrap(
    f"{WORKER}.update_weights",
    relies_on=("self.actor.engine.get_per_tensor_param", "self.checkpoint_engine.send_weights"),
    why="For every checkpoint engine but naive verl drops the adapter's configuration and sends the base alone: rollouts in "
    "processes of their own draw from the first policy for ever, with nothing in the log (verl#7495).",
    upstream="https://github.com/verl-project/verl/issues/7495",
    remove_when="verl sends peft_config and adapters through all checkpoint engines.",
)
async def actor_update_weights(
    original, self, global_steps: int | None = None, mode: str = "auto", *args: Any, **kwargs: Any
) -> Any:
    """Send the base once, if the engine was opened on dummy weights, and the adapter each time, each behind a tensor that holds its
    configuration; the rollout's client hands both on as verl does with naive.

    Raises PatchError if the checkpoint engine sends parts of changed weights, which adapters are not."""
    backend = self.config.rollout.checkpoint_engine.backend if mode == "auto" else mode
    setting = asked(self.config.model)
    if backend == "naive" or not setting:
        return await original(self, global_steps, mode, *args, **kwargs)
    if backend == "delta_sharded":
        raise PatchError(
            f"the trainer has LoRA adapters ({setting}), and checkpoint_engine.backend={backend} sends changes of the base "
            "alone, so the engine would draw from the first policy",
            **patches.at(actor_update_weights),
            advice="Choose another backend, or set actor_rollout_ref.model.lora.merge=True.",
        )
    ledger.role("trainer")
    metrics = await self.checkpoint_engine.send_weights(_stream(self), global_steps=global_steps)
    _based.add(self)
    return metrics or {}


def _stream(worker: Any) -> Iterator[tuple[str, Any]]:
    """Export the adapter, and the base if the engine was opened without it; return one marked stream, base first.

    Every rank of the trainer exports and takes all."""
    export, summon = worker.actor.engine.get_per_tensor_param, bool(worker.config.rollout.layered_summon)
    adapter, peft_config = export(layered_summon=summon, base_sync_done=True)
    if peft_config is None:
        raise PatchError(
            f"the trainer was asked for LoRA adapters ({asked(worker.config.model)}) and exports none",
            **patches.at(actor_update_weights),
            advice="Set actor_rollout_ref.model.lora.merge=True, or use a training engine that exports adapters.",
        )
    parts = marked(adapter, peft_config, base_sync_done=True)
    if "dummy" not in worker.config.rollout.load_format or worker in _based:
        return parts
    base, peft_config = export(layered_summon=summon, base_sync_done=False)
    return itertools.chain(marked(base, peft_config, base_sync_done=False), parts)


def asked(model_config: Any) -> str:
    """Return the setting of verl's ``HFModelConfig``, or of the part of a job's configuration that becomes one, that
    gives the trainer adapters which are not merged into what it sends; empty if none does."""
    lora = model_config.get("lora") or {}
    if lora.get("merge", False):
        return ""
    if rank := lora.get("rank", 0):
        return f"lora.rank={rank}"
    return f"lora_rank={rank}" if (rank := model_config.get("lora_rank", 0)) else ""


async def parts(
    client: Any, weights: Any, told: dict[str, Any], patch: Patch
) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """Yield what each call of verl's ``ServerAdapter.update_weights`` is to get, a base and an adapter apart: the
    weights, and ``told``, the keyword arguments. Raises PatchError, which names ``patch``, see `check_arrival`."""
    if relayed(weights) and told.get("wire_format", "named_tensors") == "named_tensors":
        async for part, more in Parts(weights):
            check_arrival(client, {**told, **more}, patch)
            yield part, {**told, **more}
    else:
        check_arrival(client, told, patch)
        yield weights, told


def check_arrival(client: Any, told: dict[str, Any], patch: Patch) -> None:
    """Raise PatchError if the trainer has LoRA adapters, and none comes, or no base for an engine without one."""
    setting = asked(client.model_config)
    if not setting:
        return
    if told.get("peft_config") is None:
        raise PatchError(
            f"the trainer has LoRA adapters ({setting}) and this sync brings none: the engine of replica "
            f"{client.replica_rank}, which lists no adapter, would draw from the first policy for ever",
            patch=patch.id,
            target=patch.targets[0].rpartition(".")[0],
            advice="Set actor_rollout_ref.model.lora.merge=True, or see why fp8.verl.actor_update_weights is not live in "
            "the trainer: flashpatch-verify --live.",
        )
    if not told.get("base_sync_done"):
        _based.add(client)
    elif "dummy" in client.config.load_format and client not in _based:
        raise PatchError(
            f"the engine of replica {client.replica_rank} was opened on dummy weights (load_format="
            f"{client.config.load_format}), and an adapter comes before any base",
            patch=patch.id,
            target=patch.targets[0].rpartition(".")[0],
            advice="Set actor_rollout_ref.rollout.load_format=auto: replicas that join later read the base from disk.",
        )


def marked(weights: Iterable[Named], peft_config: Mapping[str, Any], base_sync_done: bool) -> Iterator[Named]:
    """Yield a mark with ``peft_config`` (``peft.LoraConfig.to_dict()``), then the weights: the adapter's if
    ``base_sync_done``, else the base's."""
    import torch

    content = {"peft_config": peft_config, "base_sync_done": base_sync_done}
    data = json.dumps(content, default=_plain).encode()
    data += b" " * (-len(data) % _ALIGN)
    rest = iter(weights)
    first = next(rest, None)
    device = "cpu" if first is None else first[1].device
    yield f"{MARK}{int(base_sync_done)}", torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    if first is not None:
        yield first
        yield from rest


def _plain(value: Any) -> Any:
    """Return what JSON knows in place of a set, an enumeration's member, or another object of a configuration."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return getattr(value, "value", None) or str(value)


class Parts:
    """Cut a stream of names and tensors at its marks.

    Args:
        weights: what a checkpoint engine receives."""

    def __init__(self, weights: AsyncIterator[Named]) -> None:
        self._weights = aiter(weights)
        self._head: Named | None = None

    async def __aiter__(self) -> AsyncIterator[tuple[AsyncIterator[Named], dict[str, Any]]]:
        """Yield each part with the arguments of verl's update that its mark holds; empty ones for a stream without marks."""
        self._head = await anext(self._weights, None)
        while True:
            told: dict[str, Any] = {}
            if self._head is not None and self._head[0].startswith(MARK):
                told = json.loads(self._head[1].detach().cpu().numpy().tobytes())
                self._head = None
            yield self._part(), told
            if self._head is None:
                return

    async def _part(self) -> AsyncIterator[Named]:
        """Yield tensors until the next mark, which stays in ``_head``."""
        if self._head is not None:
            head, self._head = self._head, None
            yield head
        async for item in self._weights:
            if item[0].startswith(MARK):
                self._head = item
                return
            yield item


_NAME = re.compile(r"(\.lora_\w+)\.default(?=\.|$)")
"""A part of an adapter, whose own name PEFT leaves out of what it exports; verl's is the default one."""


@patches.wrap(
    "verl.utils.fsdp_utils:collect_lora_params",
    relies_on=("get_peft_model_state_dict", "FSDP.summon_full_params"),
    why="PEFT 0.21 looks for an adapter by the names of modules, which under FSDP1, verl's default, are not those of the state "
    "dict: verl exports an adapter without tensors, and stock rollouts draw from the base for ever.",
    remove_when="verl's adapters under FSDP1 export with PEFT 0.21.",
)
def collect_lora_params(original, module: Any, layered_summon: bool, base_sync_done: bool) -> dict[str, Any]:
    """Read the adapter from the state dict by its names if PEFT found nothing.

    Returns:
        verl's: name to whole tensor on the CPU.

    Raises:
        PatchError: it is not there either."""
    found = original(module=module, layered_summon=layered_summon, base_sync_done=base_sync_done)
    if found or not base_sync_done:
        return found
    found = _by_name(module)
    if not found:
        raise PatchError(
            "the trainer's model has a LoRA adapter, and neither PEFT nor its state dict names a tensor of it",
            **patches.at(collect_lora_params),
            advice="Set actor_rollout_ref.actor.strategy=fsdp2, or actor_rollout_ref.model.lora.merge=True.",
        )
    return found


def _by_name(module: Any) -> dict[str, Any]:
    """Return the parts of the adapter in the state dict of a model under FSDP1, copied: its memory is freed afterwards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        state = getattr(module, "_fsdp_wrapped_module", module).state_dict()
        return {
            _NAME.sub(r"\1", name): _whole(value).detach().to("cpu", copy=True)
            for name, value in state.items()
            if "lora_" in name
        }


def _whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
