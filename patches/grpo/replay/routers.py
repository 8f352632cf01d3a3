"""Replay recorded experts in the routers of a Hugging Face model.

The ids come from the record, in its order. The weights are computed from the router's own logits by the model's own
formula, so that the router gets the gradient of the experts that really answered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flashpatch.errors import PatchError

ID = "grpo.verl.forward_step"
TARGET = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step"
ADVICE = "Set actor_rollout_ref.rollout.enable_rollout_routing_replay=False to train with the trainer's own routing."


def _of_all(router: Any, logits: Any, ids: Any) -> Any:
    """Take the softmax over all experts; the weights of the chosen ones sum to 1 if the model says so."""
    weights = logits.float().softmax(-1).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's router has no such switch and always divides
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


def _sigmoid(block: Any, logits: Any, ids: Any) -> Any:
    """Take the sigmoid of each logit, divided by their sum if the model says so, times a constant."""
    weights = logits.sigmoid().gather(-1, ids)
    if block.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * block.routed_scaling_factor


ROUTERS: dict[str, Callable[..., Any]] = {
    "Qwen2MoeTopKRouter": _of_all,
    "Qwen3MoeTopKRouter": _of_all,
    "OlmoeTopKRouter": _of_all,
    "MixtralTopKRouter": _of_all,
    "GptOssTopKRouter": lambda router, logits, ids: logits.gather(-1, ids).softmax(-1),  # of the chosen alone
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}
"""Classes whose forward returns ``(logits, weights, ids)``, to what makes weights of logits and ids."""

BLOCKS: dict[str, Callable[..., Any]] = {"DeepseekV3MoE": _sigmoid, "Glm4MoeMoE": _sigmoid}
"""Classes whose method ``route_tokens_to_experts(logits)`` returns ``(ids, weights)``, in transformers before their routers
returned that themselves."""


class Replay:
    """Replay recorded experts in all routers of one model.

    Routers are known by the number of their layer, not by the order of calls: with gradient checkpointing each is
    called again in the backward pass.

    Args:
        model: a Hugging Face model, wrapped by FSDP or not.

    Raises:
        PatchError: the model has no router of a known class, or several in one layer."""

    def __init__(self, model: Any) -> None:
        self._rows: Any = None
        self._own_rank, self._ranks = 0, 1
        self._fired: set[int] = set()
        self._checked: set[int] = set()
        self._undo: list[Callable[[], None]] = []
        self.layers: dict[int, str] = {}
        found = _routers(model)
        for name, module in found:
            numbers = re.findall(r"layers\.(\d+)\.", name)
            if not numbers or int(numbers[-1]) in self.layers:
                raise stop(f"{name} is not the only router of a numbered layer")
            self.layers[int(numbers[-1])] = name
        if not found:
            raise stop(
                f"{type(model).__name__} has no router of a known class ({', '.join([*ROUTERS, *BLOCKS])})"
            )
        for (_, module), layer in zip(found, self.layers, strict=True):
            self._install(module, layer)

    def _install(self, module: Any, layer: int) -> None:
        name = type(module).__name__
        if name in ROUTERS:

            def on_router(router: Any, inputs: Any, output: Any) -> Any:
                logits, weights, ids = output
                ids, weights = self._replayed(router, layer, logits, ids, weights, ROUTERS[name])
                return logits, weights, ids

            self._undo.append(module.register_forward_hook(on_router).remove)
            return
        original = module.route_tokens_to_experts

        def on_block(logits: Any) -> Any:
            ids, weights = original(logits)
            return self._replayed(module, layer, logits, ids, weights, BLOCKS[name])

        module.route_tokens_to_experts = on_block
        self._undo.append(lambda: delattr(module, "route_tokens_to_experts"))

    def _replayed(
        self, module: Any, layer: int, logits: Any, ids: Any, weights: Any, formula: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """Return the recorded ids and their live weights, ``(tokens, top_k)``; the own ones where none are recorded."""
        import torch

        if self._rows is None:
            return ids, weights
        if layer not in self._checked:  # formulas are checked on what the module itself has just chosen
            own = formula(module, logits.detach(), ids).to(weights.dtype)
            if not torch.allclose(own.float(), weights.detach().float(), rtol=2**-7):
                raise stop(f"{self.layers[layer]} weighs its experts in another way than FlashPatch knows")
            self._checked.add(layer)
        self._fired.add(layer)
        count = len(ids)
        if count * self._ranks < len(self._rows):
            raise stop(
                f"{self.layers[layer]} routes {count * self._ranks} tokens, of {len(self._rows)} recorded"
            )
        part = self._rows[self._own_rank * count : (self._own_rank + 1) * count, layer].to(ids)
        if part.shape[1] != ids.shape[1]:
            raise stop(
                f"the engine chose {part.shape[1]} experts per token, {self.layers[layer]} chooses {ids.shape[1]}"
            )
        if (part >= logits.shape[-1]).any():
            raise stop(
                f"the engine chose expert {int(part.max())}, {self.layers[layer]} has {logits.shape[-1]}"
            )
        padding = part.new_full((count - len(part), part.shape[1]), -1)
        part = torch.cat([part, padding])
        chosen = torch.where(part < 0, ids, part)
        return chosen, formula(module, logits, chosen).to(weights.dtype)

    def begin(self, rows: Any, needed: Any, rank: int = 0, ranks: int = 1) -> None:
        """Take the record of one micro-batch.

        Args:
            rows: recorded ids, ``(tokens, layers of the model, top_k)``, of integers, in the order in which the model gets
                the tokens; padding at the end may be absent. A token whose ids are not distinct has no record.
            needed: ``(tokens,)``, of bool: tokens that must have a record.
            rank, ranks: which of how many equal parts of the padded tokens this process has.

        Raises:
            PatchError: layers of the record are not those of the model, or a needed token has none."""
        import torch

        self.clear()
        layers, width = rows.shape[1:]
        if width < 2:
            raise stop(
                "the engine chose one expert per token, where a missing record cannot be told from expert 0"
            )
        beyond = [layer for layer in self.layers if layer >= layers]
        others = [layer for layer in range(layers) if layer not in self.layers and rows[:, layer].any()]
        if beyond or others:
            raise stop(
                f"the engine recorded experts of {layers} layers, those without a router in the trainer's model among them: "
                f"{others or 'none'}; of layers {beyond or 'none'} it recorded nothing"
            )
        own = torch.tensor(sorted(self.layers), device=rows.device)
        recorded = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
        recorded[:, own] = (rows[:, own].sort(-1).values.diff(dim=-1) != 0).all(-1)
        missing = needed.to(rows.device) & ~recorded[:, own].all(-1)
        if missing.any():
            raise stop(
                f"{int(missing.sum())} of {int(needed.sum())} tokens up to the last one trained on have no recorded "
                f"experts in some layer"
            )
        self._rows = torch.where(recorded[..., None], rows, -1)
        self._own_rank, self._ranks = rank, ranks

    def check(self) -> None:
        """Raise PatchError unless each router was called since `begin`; it names those that were not."""
        silent = [name for layer, name in self.layers.items() if layer not in self._fired]
        if silent:
            raise stop(
                f"{len(self._fired)} of {len(self.layers)} recorded layers were routed in the trainer's forward; not: "
                f"{', '.join(silent)}"
            )

    def clear(self) -> None:
        """Let the routers choose by themselves."""
        self._rows = None
        self._fired = set()

    def remove(self) -> None:
        """Take the hooks off."""
        while self._undo:
            self._undo.pop()()


def _routers(model: Any) -> list[tuple[str, Any]]:
    modules = dict(model.named_modules())
    blocks = {
        name: module
        for name, module in modules.items()
        if type(module).__name__ in BLOCKS and hasattr(module, "route_tokens_to_experts")
    }
    gates = {
        name: module
        for name, module in modules.items()
        if type(module).__name__ in ROUTERS and name.rpartition(".")[0] not in blocks
    }
    return [*blocks.items(), *gates.items()]


def stop(problem: str) -> PatchError:
    """Return the error that ends a step which cannot be replayed."""
    return PatchError(
        f"cannot replay the engine's routing: {problem}.", patch=ID, target=TARGET, advice=ADVICE
    )
