"""Compare distributions of the next token: of whole vocabularies, and of what truncated sampling keeps."""

from __future__ import annotations

import torch


def logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Return the model's logits at each position but the last, [T - 1, V], float32 on the host."""
    device = next(model.parameters()).device
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits
    return found[0, :-1].float().cpu()


def mean_kl(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the mean over positions of KL(wanted || got), nats.

    Args:
        wanted: logits, [T, V].
        got: logits, [T, V] or wider, where an engine pads its vocabulary.
    """
    a, b = wanted.log_softmax(-1), got[:, : wanted.shape[1]].log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1).mean().item()


def likeliest(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest difference of a log-probability of the token likeliest by ``wanted``, nats; see `mean_kl`."""
    a, b = wanted.log_softmax(-1), got[:, : wanted.shape[1]].log_softmax(-1)
    return (a - b).gather(-1, a.argmax(-1, keepdim=True)).abs().max().item()


def kept_kl(wanted: torch.Tensor, got: torch.Tensor, top_p: float, top_k: int, over_kept: bool) -> float:
    """Return the mean KL(kept || wanted), nats, of what truncated sampling keeps of ``got`` and renormalizes.

    Args:
        wanted, got: logits, see `mean_kl`.
        top_p, top_k: as vLLM and SGLang take them; 1 and -1 cut nothing.
        over_kept: renormalize ``wanted`` over the same tokens too.
    """
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    kept = got[:, : wanted.shape[1]]
    kept = TopKLogitsWarper(top_k)(None, kept) if top_k > 0 else kept
    kept = TopPLogitsWarper(top_p)(None, kept) if top_p < 1 else kept
    cut = kept.isinf()
    a, b = (
        kept.log_softmax(-1),
        (wanted.masked_fill(cut, -torch.inf) if over_kept else wanted).log_softmax(-1),
    )
    return (a.exp() * (a - b)).masked_fill(cut, 0.0).sum(-1).mean().item()
