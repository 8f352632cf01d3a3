"""Linear attention with a gated delta rule, of a prompt: no step of a running request is here."""

import torch
import torch.nn.functional as F
from torchvision.absent import function as __getattr__  # noqa: F401  what a decoding engine would call

from .library import name_only, operator


@operator("causal_conv1d_weight_pack(Tensor weight) -> Tensor")
def pack(weight):
    """A copy, as of other weights."""
    return weight.clone()


def causal_conv1d_fn_cpu(
    x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **more
):
    """Convolve x [features, tokens] of several sequences, each with the features before it; ``weight`` [features, width].

    ``conv_states`` [slots, features, width - 1] has the last features of each sequence, before and after."""
    width, out = weight.shape[-1], torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for slot, known, begin, end in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:]
    ):
        state = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        whole = torch.cat([state.to(x.dtype), x[:, begin:end]], -1)
        found = F.conv1d(whole[None].float(), weight[:, None].float(), bias, groups=len(weight))[0]
        out[:, begin:end] = F.silu(found) if activation in ("silu", "swish") else found
        conv_states[slot] = whole[:, 1 - width :].to(conv_states.dtype)
    return out


def chunk_gated_delta_rule_cpu(
    *, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel, **more
):
    """The recurrence token by token; ``q``, ``k`` [1, tokens, key heads, K], ``v`` [1, tokens, value heads, V].

    ``initial_state`` [slots, value heads, V, K] is read and written."""
    assert use_qk_l2norm_in_kernel
    group = v.shape[2] // q.shape[2]
    wide, keys = (F.normalize(x[0].float(), dim=-1, eps=1e-6).repeat_interleave(group, 1) for x in (q, k))
    wide, out, bounds = wide * q.shape[-1] ** -0.5, torch.empty_like(v), cu_seqlens.tolist()
    for slot, begin, end in zip(initial_state_indices.tolist(), bounds, bounds[1:]):
        state = initial_state[slot].float()
        for at in range(begin, end):
            state = state * g[0, at].float().exp()[:, None, None]
            error = v[0, at].float() - torch.einsum("hvk,hk->hv", state, keys[at])
            state = state + torch.einsum("hv,hk->hvk", error * beta[0, at].float()[:, None], keys[at])
            out[0, at] = torch.einsum("hvk,hk->hv", state, wide[at])
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


@operator("fused_gdn_gating_cpu(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)")
def gates(A_log, a, b, dt_bias):
    """The logarithm of each head's decay, and what it takes of an error."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


@operator("fused_rmsnorm_gated_cpu(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor")
def gated_norm(x, weight, gate, eps):
    """The norm of x, gated by silu(gate)."""
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float() * F.silu(gate.float())).to(x.dtype)


@operator(
    "fused_qkvzba_split_reshape_cat_cpu(Tensor qkvz, Tensor ba, int key_heads, int value_heads, int key_dim, "
    "int value_dim) -> (Tensor, Tensor, Tensor, Tensor)"
)
def split(qkvz, ba, key_heads, value_heads, key_dim, value_dim):
    """Of projections that hold q, k, v, z of one key head after those of another: q, k, v of all heads, then z, b and a."""
    group = value_heads // key_heads
    q, k, v, z = qkvz.unflatten(-1, (key_heads, -1)).split(
        [key_dim, key_dim, group * value_dim, group * value_dim], -1
    )
    b, a = ba.unflatten(-1, (key_heads, -1)).split([group, group], -1)
    mixed = torch.cat([part.flatten(-2) for part in (q, k, v)], -1)
    return mixed, z.reshape(len(z), value_heads, value_dim), b.flatten(-2), a.flatten(-2)


name_only("fused_sigmoid_gating_delta_rule_update_cpu")
