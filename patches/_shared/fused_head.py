"""Ask a model whether its logits are its states times its head's weight, as verl's fused log-probabilities take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.context import having

_own: dict[type, Callable] = {}  # a class's forward, before verl's


def ask_the_model(patches: Patches) -> None:
    """Add a patch that asks each model of which verl's fused kernels take the forward over."""

    def patch_forward_with_backends(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """Let verl take the forward over, and raise PatchError if the model's own makes other logits."""
        own = _own.setdefault(type(model), type(model).forward)
        original(model, *args, **kwargs)
        # one on meta holds no values here, but does on rank 0
        if type(model).forward is own or model.lm_head.weight.is_meta:
            return
        if (why := _unlike(model, own)) is not None:
            raise PatchError(
                f"use_fused_kernels=True takes the states times the head's weight for the logits of {type(model).__name__}, {why}",
                patch=patches.of(patch_forward_with_backends).id,
                advice="Set actor_rollout_ref.model.use_fused_kernels=False.",
            )

    patches.wrap(
        "verl.models.transformers.monkey_patch:patch_forward_with_backends",
        evidence="optional",
        why="Models that scale, cap or shift their logits get another model's log-probabilities from verl's fused kernels.",
        remove_when="verl refuses such models itself.",
    )(patch_forward_with_backends)


def _unlike(model: Any, own: Callable) -> str | None:
    """Return what the model's own forward makes of states instead; None if it is just that product."""
    import torch

    weight = model.lm_head.weight.detach()
    states = torch.sin(torch.arange(1.0, 1 + weight.shape[1], device=weight.device)).to(weight.dtype)
    largest = (weight @ states).abs().max()
    states = torch.stack([states * (1000 / largest), 0 * states])[None]  # a cap shows far out, a bias at 0
    plain = (states @ weight.T).float()
    ids = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
    # positions of four kinds, as models of images take them
    asked = dict(input_ids=ids, position_ids=ids.expand(4, 1, 2))
    try:
        with torch.no_grad(), having(model.model, "forward", lambda *args, **kwargs: _Outputs(states)):
            logits = own(model, **asked, use_cache=False, return_dict=True).logits.float()
    except Exception as error:
        return f"which cannot be asked for them ({type(error).__name__}: {error})"
    if logits.shape != plain.shape:
        return f"which makes {logits.shape[-1]} of {plain.shape[-1]}"
    far, at_zero = (logits - plain).abs().amax((0, 2)).tolist()
    said = f"which makes them {far:.3g} off where they reach 1000, {at_zero:.3g} at 0"
    return None if far <= 10 and at_zero == 0 else said


class _Outputs:
    """What a base model returns: its last states, and nothing else."""

    def __init__(self, states: Any) -> None:
        self.last_hidden_state = states

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]

    def __getattr__(self, name: str) -> None:
        return None
