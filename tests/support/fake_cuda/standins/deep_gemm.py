"""DeepGEMM's scale layout on Blackwell, and its product, which no CPU has."""

import torch


def use(binding) -> None:
    """Replace what `vllm.utils.deep_gemm` takes from DeepGEMM when it is first called; without the package nothing is replaced."""
    take = binding._lazy_init

    def take_and_replace() -> None:
        take()
        if binding._transform_sf_into_required_layout_impl is not None:
            binding._lazy_init = take
            _replace(binding)

    binding._lazy_init = take_and_replace


def _replace(binding) -> None:
    real = binding._transform_sf_into_required_layout_impl

    def transform(sf, mn, k, recipe, num_groups=None, *_, disable_ue8m0_cast=False, **more):
        if torch.cuda.get_device_capability()[0] < 10 or disable_ue8m0_cast:
            return real(
                sf=sf, mn=mn, k=k, recipe=recipe, num_groups=num_groups,
                disable_ue8m0_cast=disable_ue8m0_cast, **more,
            )  # fmt: skip
        return packed_scales(sf, mn, recipe[1])

    binding._transform_sf_into_required_layout_impl = transform
    binding._fp8_gemm_nt_impl = fp8_gemm_nt


def packed_scales(scales: torch.Tensor, rows: int, block: int) -> torch.Tensor:
    """Return scales as UE8M0, four exponents in an int32, column-major with rows aligned to four for TMA.

    ``scales``: float32 [groups, rows / block, columns] or without groups; also one per row; ``rows``: rows of the matrix;
    ``block``: rows that share a scale."""
    grouped = scales if scales.dim() == 3 else scales[None]
    if grouped.shape[1] != rows:
        grouped = grouped.repeat_interleave(block, 1)[:, :rows]
    exponents = (grouped.float().contiguous().view(torch.int32) >> 23) & 255
    words = -(-exponents.shape[2] // 4)
    padded = torch.nn.functional.pad(exponents, (0, 4 * words - exponents.shape[2])).to(torch.uint8)
    values = padded.view(*padded.shape[:2], words, 4).contiguous().view(torch.int32)[..., 0]
    aligned = -(-rows // 4) * 4
    out = torch.empty_strided(
        values.shape, (aligned * words, 1, aligned), dtype=torch.int32, device=scales.device
    )
    out.copy_(values)
    return out if scales.dim() == 3 else out[0]


def fp8_gemm_nt(a, b, out, c=None, disable_ue8m0_cast=False, **_):
    """Multiply [m, k] by [n, k] transposed, each with its block scales."""
    out.copy_((_wide(*a) @ _wide(*b).t()).to(out.dtype))


def _wide(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.int32:
        fields = torch.stack([(scales >> (8 * i)) & 255 for i in range(4)], -1).flatten(-2)
        scales = (fields[:, : -(-values.shape[1] // 128)] << 23).to(torch.int32).view(torch.float32)
    if scales.shape[0] != values.shape[0]:
        scales = scales.repeat_interleave(128, 0)[: values.shape[0]]
    return values.float() * scales.repeat_interleave(128, 1)[:, : values.shape[1]]
