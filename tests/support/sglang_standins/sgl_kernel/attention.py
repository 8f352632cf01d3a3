"""Attention over the paged cache, one request at a time.

Shapes: q [tokens, heads, dim], k and v [tokens, key-value heads, dim], buffers [slots, key-value heads, dim]."""

import torch

from .library import VERSION, operator


def _attend(q, keys, values, scale, cap, visible, sinks):
    """Softmax attention in float32; ``visible`` is bool [queries, keys]."""
    group = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, 1)
    values = values.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)


@operator(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, float k_scale, float v_scale, Tensor(c!) o, "
    "Tensor? key, Tensor? value, Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor "
    "seq_lens, float sm_scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks=None) -> ()",
    when=VERSION >= (0, 5, 20),
)
def decode_attention(
    q,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    o,
    key,
    value,
    loc,
    scratch,
    table,
    rows,
    lengths,
    scale,
    cap,
    is_cross=False,
    window=0,
    encoder_lens=None,
    sinks=None,
):
    """One new token per request: store its key and value, attend to all of its sequence."""
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist())):
        slots = table[row, :length].long()
        visible = torch.arange(length)[None] >= (length - window if window > 0 else 0)
        o[i : i + 1] = _attend(q[i : i + 1], k_buffer[slots], v_buffer[slots], scale, cap, visible, sinks)


@operator(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, float k_scale, float "
    "v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, bool is_cross, int window, Tensor? encoder_lens, Tensor? sinks=None, "
    "Tensor? tree_mask=None, bool is_causal=True) -> ()",
    when=VERSION >= (0, 5, 20),
)
def extend_attention(
    q,
    k,
    v,
    o,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    table,
    rows,
    lengths,
    new,
    starts,
    longest,
    scale,
    cap,
    is_cross=False,
    window=0,
    encoder_lens=None,
    sinks=None,
    tree_mask=None,
    is_causal=True,
):
    """Several new tokens per request, whose keys and values are given or, with those before, in the buffers.

    Given ones may be of other sizes than the buffers', which MLA fills with latents, where nothing comes before them.

    ``tree_mask`` holds, request after request, bool [new, columns]; columns are the whole sequence or, where the
    sizes say so, the new tokens alone."""
    own_only = tree_mask is not None and tree_mask.numel() == int((new.long() ** 2).sum())
    read = 0
    for row, length, count, start in zip(rows.tolist(), lengths.tolist(), new.tolist(), starts.tolist()):
        at, there = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
        if tree_mask is not None:
            columns = count if own_only else length
            visible = torch.ones(count, length, dtype=torch.bool)
            given = tree_mask.view(-1)[read : read + count * columns].view(count, columns)
            visible[:, length - columns :] = given.bool()
            read += count * columns
        else:
            visible = there <= at if is_causal else torch.ones(count, length, dtype=torch.bool)
        if window > 0:
            visible = visible & (there > at - window)
        slots, here = table[row, :length].long(), slice(start, start + count)
        keys, values = (
            buffer[slots] if own is None else _behind(buffer[slots[: length - count]], own[here])
            for buffer, own in ((k_buffer, k), (v_buffer, v))
        )
        o[here] = _attend(q[here], keys, values, scale, cap, visible, sinks)


def _behind(before, own):
    """The rows of a buffer, then a request's own."""
    return torch.cat([before.to(own.dtype), own]) if len(before) else own


@operator(
    "decode_attention_cpu(Tensor q, Tensor(a!) k_buffer, Tensor(b!) v_buffer, Tensor(c!) o, Tensor? key, Tensor? value, "
    "Tensor loc, Tensor attn_logits, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, "
    "float logit_cap, bool is_cross=False, int window=0, Tensor? encoder_lens=None, Tensor? sinks=None) -> ()",
    when=VERSION < (0, 5, 20),
)
def decode_attention_0_5_12(q, k, v, *rest):
    """`decode_attention` without scales; on 0.5.12 without windows, encoders and sinks too."""
    decode_attention(q, k, v, 1.0, 1.0, *rest)


@operator(
    "extend_attention_cpu(Tensor q, Tensor? k, Tensor? v, Tensor(a!) o, Tensor k_buffer, Tensor v_buffer, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, bool is_cross=False, int window=0, "
    "Tensor? encoder_lens=None, Tensor? sinks=None, Tensor? tree_mask=None, bool is_causal=True) -> ()",
    when=VERSION < (0, 5, 20),
)
def extend_attention_0_5_12(q, k, v, o, k_buffer, v_buffer, *rest):
    """`extend_attention` without scales; on 0.5.12 without windows, encoders, sinks and trees too."""
    extend_attention(q, k, v, o, k_buffer, v_buffer, 1.0, 1.0, *rest)
