"""Detect accelerators; the family refuses to run beside one."""

from __future__ import annotations

from flashpatch.errors import PatchError


def found() -> str | None:
    """Return the accelerator that torch can use in this process, such as ``"cuda"``; None without one."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def refuse(patch: str) -> None:
    """Raise when there is an accelerator.

    Raises:
        PatchError: names ``patch`` and the accelerator.
    """
    device = found()
    if device is not None:
        raise PatchError(
            f"is for machines without an accelerator, and this one has {device}.",
            patch=patch,
            advice="Take cpu out of FLASHPATCH; verl supports this device itself. To try cpu all the same, "
            "hide the device (CUDA_VISIBLE_DEVICES='').",
        )
