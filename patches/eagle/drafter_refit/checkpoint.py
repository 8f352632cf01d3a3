"""Read and check a drafter's new weights before anything is touched.

The drafter's own checkpoint, with which the engine was opened, says which names and shapes an update must
have: exactly those, less what the drafter shares with the target. So a tensor of the target is refused by
name, and an update is read, checked and known to be whole before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch.errors import PatchError
from flashpatch.patches._shared.checkpoint_shapes import files, shapes

if TYPE_CHECKING:
    import torch

_SHOWN = 4  # names in a message


def load(path: Path, own: Path, shared: set[str], patch: str) -> dict[str, torch.Tensor]:
    """Read all tensors of an update, by name, once they are known to be the drafter's.

    Args:
        path: a safetensors file, or a directory of them.
        own, shared, patch: see `check`.

    Raises:
        PatchError: there is none, a file is damaged, or see `check`."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in files(path):
        try:
            tensors |= load_file(file)
        except Exception as error:  # safetensors raises errors of its own beside OSError
            raise problem(patch, f"{file} cannot be read: {error}", "Write the checkpoint again.") from error
    if not tensors:
        raise problem(
            patch, f"{path} holds no safetensors", "Give a safetensors file or a directory of them."
        )
    copies = {name for name in shapes(own) if shared & set(name.split("."))}  # which the engine does not use
    tensors = {name: tensor for name, tensor in tensors.items() if name not in copies}
    check(tensors, own, shared, path, patch)
    return tensors


def check(tensors: Mapping[str, torch.Tensor], own: Path, shared: set[str], path: Any, patch: str) -> None:
    """Refuse ``tensors`` that are not the drafter's, all of them and finite.

    Args:
        tensors: of the update, by name.
        own: the drafter's own checkpoint.
        shared: names of the modules that the drafter shares with the target.
        path: of the update, for messages.
        patch: id of the patch that errors name.

    Raises:
        PatchError: names or shapes differ, or a value is NaN or infinite."""
    theirs = sorted(name for name in tensors if shared & set(name.split(".")))
    if theirs:
        raise problem(
            patch,
            f"{path} holds {_list(theirs)}, which this drafter shares with the target",
            "Leave them out: the target's update brings them.",
        )
    wanted = {name: shape for name, shape in shapes(own).items() if not shared & set(name.split("."))}
    if wanted:  # else the engine fetched its checkpoint from elsewhere
        extra = sorted(tensors.keys() - wanted.keys())
        missing = sorted(wanted.keys() - tensors.keys())
        if extra or missing:
            problems = [f"has {_list(extra)}, unknown to the drafter"] if extra else []
            problems += [f"lacks {_list(missing)}"] if missing else []
            raise problem(
                patch, f"{path} {' and '.join(problems)}", f"Send all tensors of {own}, under its names."
            )
        wrong = [name for name, shape in wanted.items() if tuple(tensors[name].shape) != shape]
        if wrong:
            name = wrong[0]
            raise problem(
                patch,
                f"{name} in {path} has shape {tuple(tensors[name].shape)}, not {wanted[name]}",
                "Train the drafter that this engine was opened with.",
            )
    broken = [
        n for n, tensor in tensors.items() if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if broken:
        raise problem(
            patch,
            f"{_list(sorted(broken))} in {path} holds NaN or infinity",
            "Look at the drafter's training.",
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def problem(patch: str, what: str, advice: str) -> PatchError:
    """Make an error about an update; ``what`` comes without a full stop."""
    return PatchError(f"{what}.", patch=patch, advice=advice)
