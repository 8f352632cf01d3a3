"""Replace verl's fused log-probabilities on request, or if they are wrong."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch

HOME = "verl.utils.experimental.torch_functional"


def on_forward(
    original, self, hidden_states: Any, vocab_weights: Any, input_ids: Any, temperature: float = 1.0
) -> tuple[Any, Any]:
    """Replace ``FusedLinearForPPO.forward``: the same results, in float32."""
    from flashpatch.patches.grpo.loss.logprobs import token_logprobs

    weights = vocab_weights.full_tensor() if hasattr(vocab_weights, "full_tensor") else vocab_weights
    found = token_logprobs(
        hidden_states.to(weights.dtype), weights, input_ids.long(), temperature=temperature, entropy=True
    )
    return found.logprobs, found.entropy


def native(site: Any) -> str | None:
    """Name verl's own when it is right on a small case and the option logprobs is off."""
    if site.options.get("logprobs"):
        return None
    import torch

    draw = torch.Generator().manual_seed(0)
    states, head = torch.randn(40, 8, generator=draw), torch.randn(50, 8, generator=draw)
    labels = torch.arange(40)
    logs = torch.log_softmax(states @ head.t() / 0.7, -1)
    entropy = -(logs.exp() * logs).sum(-1)
    got, spread = site.original(site.owner(chunk_size=16), states, head, labels, 0.7)
    away = max((got - logs[labels, labels]).abs().max().item(), (spread - entropy).abs().max().item())
    return f"verl's {site.owner.__name__}, {away:.0e} from the plain way" if away < 1e-4 else None


PATCH = Patch(
    id="grpo.verl.fused_linear_for_ppo_forward",
    targets=(f"{HOME}:FusedLinearForPPO.forward",),
    requires="verl>=0.9",
    wrapper=on_forward,
    native=native,
    contract=Contract(params=("hidden_states", "vocab_weights", "input_ids", "temperature")),
    evidence="optional",
    scope=frozenset({"trainer"}),
    why="verl's fused log-probabilities (model.use_fused_kernels) are chunked and right in float32. In bf16 "
    "they round logits, entropy and the sum of the head's gradient; without an accelerator bf16 products "
    "are slow.",
    how="Keeps verl's by default. With the option logprobs, computes them in blocks with float32 sums.",
    remove_when="verl's torch backend sums in float32.",
)
