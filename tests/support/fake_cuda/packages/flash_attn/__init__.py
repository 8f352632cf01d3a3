"""FlashAttention 2 as trainers call it, in torch and with gradients: what pads nothing and takes no tensor of the CPU."""

import torch

__version__ = "2.8.3"


def flash_attn_func(q, k, v, *arguments, **keywords):
    """Attend within each row of [batch, tokens, heads, size]."""
    rows, length = q.shape[:2]
    ends = torch.arange(0, rows * length + 1, length), torch.arange(0, rows * k.shape[1] + 1, k.shape[1])
    ragged = (part.flatten(0, 1) for part in (q, k, v))
    return flash_attn_varlen_func(*ragged, *ends, length, k.shape[1], *arguments, **keywords).view_as(q)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, **_,
):  # fmt: skip
    """Attend within each sequence of [tokens, heads, size], whose ends are in ``cu_seqlens_q`` and ``cu_seqlens_k``."""
    if not q.is_cuda:
        raise RuntimeError("FlashAttention only supports CUDA tensors")
    if dropout_p or softcap or tuple(window_size) != (-1, -1):
        raise NotImplementedError("dropout, a soft cap or a window")
    outputs = []
    starts = zip(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), strict=True)
    previous = next(starts)
    for ends in starts:
        mine, theirs = (slice(a, b) for a, b in zip(previous, ends, strict=True))
        outputs.append(_attend(q[mine], k[theirs], v[theirs], softmax_scale or q.shape[-1] ** -0.5, causal))
        previous = ends
    return torch.cat(outputs)


def flash_attn_with_kvcache(*_, **__):
    raise NotImplementedError("a KV cache in a trainer")


def _attend(q, k, v, scale, causal):
    repeated = (part.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    keys, values = repeated
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if causal:
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(later.triu(1 + len(k) - len(q)), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
