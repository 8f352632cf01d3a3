"""Make samples for tests."""

import torch

from flashpatch.patches.eagle.capture.sample import Sample


def sample(n: int = 7, seed: int = 0, width: int = 8, dtype: torch.dtype = torch.bfloat16, **more) -> Sample:
    noise = torch.Generator().manual_seed(seed)
    fields = dict(
        request=f"request-{seed}",
        input_ids=torch.randint(100, (n,), generator=noise),
        hidden=torch.randn(n, width, generator=noise).to(dtype),
        known=torch.rand(n, generator=noise) < 0.8,
        response=torch.arange(n) >= n // 2,
        version=seed,
    )
    return Sample(**{**fields, **more})


def equal(one: Sample, other: Sample) -> bool:
    names = ("input_ids", "hidden", "known", "response", "auxiliary")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    same = all((a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)) for a, b in pairs)
    return same and (one.request, one.version) == (other.request, other.version)
