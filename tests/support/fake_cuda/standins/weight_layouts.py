"""Permutations of weights for Marlin and Machete."""

import torch

from fake_cuda.standins import operator


@operator("_C::gptq_marlin_repack")
def gptq_marlin_repack(packed, *arguments):
    """Return Marlin's layout [k / 16, n * bits / 2] of GPTQ weights [k * bits / 32, n], packed along k."""
    # Before 0.33 the order of activations came second.
    if isinstance(arguments[0], torch.Tensor):
        if arguments[0].numel():
            raise NotImplementedError("weights in the order of activations")
        arguments = arguments[1:]
    k, n, bits, is_a_8bit = (*arguments, False)[:4]
    values = _fields(packed, bits, dim=1).reshape(k, n)
    return marlin(values, k, n, bits, is_a_8bit)


@operator("_C::machete_prepack_B")
def machete_prepack_B(weights, a_type, b_type_id, group_scales_type=None):
    """Return a bijection of the bytes, not Machete's own: enough to see whether an update prepacks anew."""
    return torch.empty_like(weights).copy_(weights.flip(0, 1))


def marlin(values: torch.Tensor, k: int, n: int, bits: int, is_a_8bit: bool) -> torch.Tensor:
    """Return int32 [k / 16, n * 16 * bits / 32] for integers [k, n], by vLLM's own reference in Python."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference

    perm = reference.get_weight_perm(bits, is_a_8bit)
    permuted = reference.marlin_permute_weights(values, k, n, perm, is_a_8bit=is_a_8bit)
    per_word = 32 // bits
    words = sum(permuted[:, i::per_word] << (bits * i) for i in range(per_word))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unmarlin(packed: torch.Tensor, k: int, n: int, bits: int) -> torch.Tensor:
    """Return the integers [k, n] of Marlin's layout: the inverse of `marlin`."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_test as reference

    perm = reference.get_weight_perm(bits, False).to(packed.device)
    inverse = torch.empty_like(perm)
    inverse[perm] = torch.arange(perm.numel(), device=perm.device)
    values = _fields(packed, bits, dim=2).reshape(-1, perm.numel())[:, inverse]
    return values.reshape(k // 16, n // 16, 16, 16).permute(0, 2, 1, 3).reshape(k, n)


def _fields(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the unsigned fields of each int32 word as int64, stacked in a new dimension ``dim``."""
    words = packed.to(torch.int64) & 0xFFFFFFFF
    mask = (1 << bits) - 1
    return torch.stack([(words >> (bits * i)) & mask for i in range(32 // bits)], dim)
