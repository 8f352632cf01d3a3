"""What a forward of a transformer calls beside products: norms, activations, positions, embeddings, KV writes."""

import torch

from fake_cuda.standins import operator
from fake_cuda.standins.rounding import to_fp8


def _normalized(values: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = values.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)


@operator("_C::rms_norm")
def rms_norm(out, values, weight, epsilon):
    """Normalize rows by their root mean square."""
    normalized = _normalized(values, epsilon)
    out.copy_(normalized if weight is None else normalized.to(values.dtype) * weight)


@operator("_C::fused_add_rms_norm")
def fused_add_rms_norm(values, residual, weight, epsilon):
    """Add the residual in place, then normalize the sum."""
    residual.add_(values)
    normalized = _normalized(residual, epsilon)
    values.copy_(normalized if weight is None else normalized.to(values.dtype) * weight)


@operator("_C::silu_and_mul")
def silu_and_mul(out, values):
    """Multiply SiLU of the first half by the second."""
    gate, up = values.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate.float()).to(values.dtype) * up)


@operator("_C::rotary_embedding")
def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, offset=0, inverse=False):
    """Rotate query and key in place by the angles of their positions."""
    cos, sin = cos_sin_cache.index_select(0, positions.flatten()).float()[:, None].chunk(2, -1)
    width = cos.shape[-1] * 2
    for states in (query, key):
        if states is None:
            continue
        heads = states.view(positions.numel(), -1, head_size)
        turned = heads[..., offset : offset + width].float()
        a, b = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        rotated = torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)
        heads[..., offset : offset + width] = rotated.to(states.dtype)


@operator("_C::vocab_parallel_embedding")
def vocab_parallel_embedding(out, ids, weight, start, end, *_):
    """Look up the rows of this rank's part of the vocabulary; zeros for others."""
    ids = ids.flatten().long()
    ours = (ids >= start) & (ids < end)
    rows = weight[(ids - start).clamp(0, weight.shape[0] - 1)] * ours[:, None].to(weight.dtype)
    out.copy_(rows.reshape(out.shape))


@operator("_C_cache_ops::reshape_and_cache_flash")
def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, cache_dtype, key_scale, value_scale):
    """Write keys and values into their slots, rounded to fp8 if the cache is."""
    used = slots >= 0
    slot, block = slots[used].long(), key_cache.shape[1]
    for states, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        rows = states[: slots.numel()][used]
        if cache_dtype.startswith("fp8"):
            rows, cache = to_fp8(rows, scale).view(torch.uint8), cache.view(torch.uint8)
        cache[slot // block, slot % block] = rows


@operator("_C_cache_ops::concat_and_cache_mla")
def concat_and_cache_mla(latent, rotated, cache, slots, cache_dtype, scale):
    """Write MLA's latent states and rotated keys into their slots, beside each other."""
    used = slots >= 0
    slot, block = slots[used].long(), cache.shape[1]
    cache[slot // block, slot % block] = torch.cat([latent, rotated.reshape(len(rotated), -1)], -1)[
        : slots.numel()
    ][used]
