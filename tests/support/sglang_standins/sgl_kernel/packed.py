"""Operators that SGLang calls where it sees AMX tiles; here a "packed" weight is a plain copy."""

import torch
import torch.nn.functional as F

from .library import name_only, operator


@operator("init_cpu_threads_env(str ids) -> ()")
def init_threads(ids):
    """Threads stay as they are."""


@operator("initialize(int size, int rank) -> ()")
def initialize(size, rank):
    """Nothing is kept: ranks meet in `all_reduce` and `all_gather`."""


def _group():
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group().device_group


@operator("shm_allreduce(Tensor(a!) x, int op) -> ()")
def all_reduce(x, op):
    """The sum over the tensor-parallel ranks, in place, by gloo, as SGLang has it without AMX."""
    torch.distributed.all_reduce(x, group=_group())


@operator("shm_allgather(Tensor x, int dim) -> Tensor")
def all_gather(x, dim):
    """What every tensor-parallel rank has, joined along ``dim``."""
    parts = [torch.empty_like(x) for _ in range(_group().size())]
    torch.distributed.all_gather(parts, x.contiguous(), group=_group())
    return torch.cat(parts, dim)


@operator("convert_weight_packed(Tensor weight) -> Tensor")
def pack(weight):
    """A copy, as the real operator gives new memory in another layout."""
    return weight.clone()


@operator("weight_packed_linear(Tensor x, Tensor weight, Tensor? bias, bool is_vnni) -> Tensor")
def linear(x, weight, bias, is_vnni):
    """x @ weight.T + bias."""
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


@operator(
    "fp8_per_tensor_scaled_mm_cpu(Tensor x, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype, bool is_vnni) -> Tensor"
)
def fp8_linear(x, weight, scale, bias, dtype, is_vnni):
    """float8 weight [out, in] with one scale, or one per row; activations keep their precision."""
    scale = scale.float().reshape(-1, 1) if scale.numel() > 1 else scale.float().reshape(())
    return F.linear(x.float(), weight.float() * scale, None if bias is None else bias.float()).to(dtype)


@operator(
    "int8_scaled_mm_with_quant(Tensor x, Tensor weight, Tensor scale, Tensor? bias, ScalarType dtype, bool is_vnni) -> Tensor"
)
def int8_linear(x, weight, scale, bias, dtype, is_vnni):
    """int8 weight [out, in], a scale per row; activations are rounded to int8 per token."""
    step = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-7) / 127
    rounded = (x.float() / step).round().clamp(-127, 127)
    y = F.linear(rounded, weight.float()) * step * scale.float().reshape(1, -1)
    return (y if bias is None else y + bias.float()).to(dtype)


@operator("rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor")
def rms_norm(x, weight, eps):
    """Root mean square norm over the last dimension."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


@operator("fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
def add_rms_norm(x, residual, weight, eps):
    """Add ``x`` into the residual, then write the norm of that into ``x``."""
    residual.add_(x)
    x.copy_(rms_norm(residual, weight, eps))


@operator("gemma_rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor")
def gemma_norm(x, weight, eps):
    """The same, scaled by 1 + weight in float32."""
    return rms_norm(x.float(), 1 + weight.float(), eps).to(x.dtype)


operator("gemma3_rmsnorm_cpu(Tensor x, Tensor weight, float eps) -> Tensor")(gemma_norm)


@operator("gemma_fused_add_rmsnorm_cpu(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps) -> ()")
def add_gemma_norm(x, residual, weight, eps):
    """As `add_rms_norm`."""
    residual.add_(x)
    x.copy_(gemma_norm(residual, weight, eps))


@operator("silu_and_mul_cpu(Tensor x) -> Tensor")
def silu_and_mul(x):
    """silu(first half) * second half."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@operator("gelu_tanh_and_mul_cpu(Tensor x) -> Tensor")
def gelu_and_mul(x):
    """gelu(first half), by its approximation with tanh, * second half."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


@operator(
    "store_cache_cpu(Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor slots, int width) -> ()"
)
def store_cache(k, v, keys, values, slots, width):
    """Write keys and values of new tokens into their slots."""
    keys[slots] = k.view(-1, *keys.shape[1:]).to(keys.dtype)
    values[slots] = v.view(-1, *values.shape[1:]).to(values.dtype)


@operator(
    "rotary_embedding_cpu(Tensor positions, Tensor q, Tensor k, int head_size, Tensor table, bool neox) -> (Tensor, Tensor)"
)
def rotary(positions, q, k, head_size, table, neox):
    """Rotate pairs of features by position; ``table`` [positions, rotated] holds cosines, then sines."""
    cos, sin = (part[:, None] for part in table[positions].float().chunk(2, -1))

    def turn(x):
        heads = x.reshape(x.shape[0], -1, head_size).float()
        rotated, rest = heads[..., : 2 * cos.shape[-1]], heads[..., 2 * cos.shape[-1] :]
        a, b = rotated.chunk(2, -1) if neox else (rotated[..., 0::2], rotated[..., 1::2])
        pair = (a * cos - b * sin, b * cos + a * sin)
        turned = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
        return torch.cat([turned, rest], -1).reshape(x.shape).to(x.dtype)

    return turn(q), turn(k)


# Without these names SGLang cannot import its model files, and falls back to another implementation in silence.
name_only(
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_sigmoid_mul_cpu",
    "fused_moe_router_cpu",
)
