"""Experts, and which of them each token goes to.

Shapes: hidden states [tokens, hidden], logits of a router [tokens, experts], weights of experts [experts, out, in], where the first
layer's rows are those of gates, then of what they gate."""

import torch
import torch.nn.functional as F

from .library import VERSION, operator


def _chosen(scores, ranks, count, renormalize, factor=None):
    """Weights and numbers of the ``count`` experts that rank first, as float32 and int32."""
    found = ranks.topk(count, -1).indices
    weights = scores.gather(-1, found)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * (factor or 1.0), found.int()


@operator(
    "topk_softmax_cpu(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)",
    when=VERSION > (0, 5, 12),
)
def softmax_router(hidden_states, gating_output, topk, renormalize, correction_bias=None):
    """Scores are a softmax; a bias counts for the choice alone."""
    scores = gating_output.float().softmax(-1)
    return _chosen(scores, scores if correction_bias is None else scores + correction_bias, topk, renormalize)


@operator(
    "biased_grouped_topk_cpu(Tensor hidden, Tensor logits, Tensor bias, int topk, bool renormalize, int? groups, "
    "int? topk_group, int shared, float? factor, *, Tensor? num_token_non_padded=None) -> (Tensor, Tensor)",
    when=VERSION > (0, 5, 12),
)
def biased_router(
    hidden, logits, bias, topk, renormalize, groups, topk_group, shared, factor, num_token_non_padded=None
):
    """Scores are sigmoids; of ``groups`` of experts those are kept whose two best, with the bias, are largest."""
    assert not shared
    scores = logits.float().sigmoid()
    parts = (scores + bias.float()).unflatten(-1, (groups or 1, -1))
    best = parts.topk(min(2, parts.shape[-1]), -1).values.sum(-1).topk(topk_group or 1, -1).indices
    left = torch.zeros(parts.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
    ranks = parts.masked_fill(~left[..., None], float("-inf")).flatten(-2)
    return _chosen(scores, ranks, topk, renormalize, factor)


@operator(
    "fused_experts_cpu(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, bool inplace, int quantized, "
    "Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_zp, Tensor? w2_zp, int[]? block, Tensor? b13, Tensor? b2, "
    "float? alpha, float? limit, bool is_vnni, str activation) -> Tensor",
    when=VERSION > (0, 5, 12),
)
def experts(
    x,
    w13,
    w2,
    weights,
    ids,
    inplace,
    quantized,
    w1_scale,
    w2_scale,
    w1_zp,
    w2_zp,
    block,
    b13,
    b2,
    alpha,
    limit,
    is_vnni,
    activation,
):
    """The weighted sum of the experts of each token, none of which is quantized."""
    assert w1_scale is None and (b13 is None) == (alpha is None) and activation == "silu"
    out = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(len(w13)):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        both = F.linear(x[tokens], w13[expert], None if b13 is None else b13[expert].to(x.dtype))
        if alpha is None:
            gate, up = both.chunk(2, -1)
            inner = F.silu(gate) * up
        else:  # GPT-OSS: gates and what they gate alternate, and both are clamped
            gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
            inner = (up + 1) * gate * (alpha * gate).sigmoid()
        found = F.linear(inner, w2[expert], None if b2 is None else b2[expert].to(x.dtype))
        out.index_add_(0, tokens, found.float() * weights[tokens, places, None])
    return out.to(x.dtype)


@operator(
    "shared_expert_cpu(Tensor x, Tensor w13, Tensor w2, Tensor(a!) routed, float factor, bool inplace, bool int8, "
    "bool fp8, Tensor? w1_scale, Tensor? w2_scale, int[]? block, bool is_vnni) -> Tensor",
    when=VERSION > (0, 5, 12),
)
def shared_expert(x, w13, w2, routed, factor, inplace, int8, fp8, w1_scale, w2_scale, block, is_vnni):
    """What every token gets, and the sum of its experts times ``factor``."""
    assert not (int8 or fp8)
    gate, up = F.linear(x, w13).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w2) + routed * factor


@operator(
    "fused_linear_sigmoid_mul(Tensor x, Tensor weight, Tensor? bias, bool is_vnni, Tensor value) -> Tensor",
    when=VERSION > (0, 5, 12),
)
def gated(x, weight, bias, is_vnni, value):
    """A value times sigmoid(x @ weight.T)."""
    return F.linear(x, weight, bias).sigmoid() * value
