"""Read the values of an adapter once: are they finite, and which content are they."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from flashpatch.patches._shared import fingerprint

try:
    import xxhash
except ImportError:  # verl, TRL and SGLang bring it; vLLM does not
    xxhash = None


def read(tensors: Sequence[torch.Tensor]) -> tuple[bool, bytes]:
    """Return whether all values are finite, and a digest of their bits.

    The first is False too if values are so large that their sum is infinite. Digests are of two kinds, by whether the package
    xxhash is installed: its hash of 128 bits, or the exact fingerprints of weights, which take longer."""
    content = hashlib.sha256() if xxhash is None else xxhash.xxh3_128()
    sums = []
    for tensor in tensors:
        here = (tensor.detach() if tensor.requires_grad else tensor).cpu().contiguous()
        if xxhash is None:
            content.update(repr(fingerprint.of(here)).encode())
        else:
            content.update(here.view(torch.uint8).numpy())
        sums.append(here.sum())  # while the values are in the cache
    return not sums or bool(torch.isfinite(torch.stack(sums)).all()), content.digest()
