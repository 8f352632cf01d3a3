"""FlashAttention in torch, for whole engines."""

import torch

from fake_cuda.graphs import whole


def use(flash_attn) -> None:
    """Let a backend of vLLM that calls FlashAttention, MLA's for prefill among them, call the function below."""
    flash_attn.flash_attn_varlen_func = whole(flash_attn_varlen_func)
    if hasattr(flash_attn, "get_scheduler_metadata"):
        flash_attn.get_scheduler_metadata = lambda *_, **__: None


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q=None, cu_seqlens_q=None, max_seqlen_k=None, cu_seqlens_k=None, seqused_k=None,
    softmax_scale=None, causal=False, block_table=None, out=None, alibi_slopes=None, k_descale=None, v_descale=None, **_,
):  # fmt: skip
    """Attend from ragged queries [tokens, heads, size] to keys and values in pages, or beside them."""
    bounds = cu_seqlens_q.tolist()
    out = q.new_zeros(*q.shape[:-1], v.shape[-1]) if out is None else out
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        length = int(seqused_k[i]) if seqused_k is not None else end - start
        if end <= start or length <= 0:
            continue
        if block_table is None:
            keys, values = k[start:end].float(), v[start:end].float()
        else:
            pages = block_table[i, : -(-length // k.shape[1])].long()
            keys, values = (cache[pages].flatten(0, 1)[:length].float() for cache in (k, v))
        if k_descale is not None:
            keys, values = keys * k_descale.flatten()[0], values * v_descale.flatten()[0]
        groups = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * softmax_scale
        last = torch.arange(length - (end - start), length, device=q.device)[:, None]
        ahead = torch.arange(length, device=q.device)[None] - last
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.reshape(-1, 1, 1) * ahead.abs()
        if causal:
            scores = scores.masked_fill(ahead > 0, float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
    return out
