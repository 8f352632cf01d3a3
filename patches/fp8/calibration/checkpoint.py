"""Read a Hugging Face checkpoint in safetensors, one tensor at a time, offline."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import user_directories
from flashpatch.patches._shared.checkpoint_shapes import files, shapes
from flashpatch.patches.fp8.calibration.errors import refuse

if TYPE_CHECKING:
    import torch


class Checkpoint:
    """List what a checkpoint holds, without loading it.

    Args:
        where: a directory, or the id of a repository in the local Hugging Face cache.

    Attributes:
        path: the directory.
        config: ``config.json``.
        shapes: tensor name to shape.

    Raises:
        PatchError: no such checkpoint here, or none in safetensors, or it cannot be read."""

    def __init__(self, where: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = directory(where)
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        try:
            self.config = json.loads((self.path / "config.json").read_text())
            self.shapes = shapes(self.path)
            for file in files(self.path):
                opened = self._open.enter_context(safe_open(file, framework="pt"))
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise refuse(self.path, f"cannot be read ({type(error).__name__}: {error})") from error
        if not self.shapes:
            raise refuse(self.path, "holds no safetensors", "Save the model with safetensors first.")

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor as stored, on the CPU. Raises PatchError: there is none."""
        if name not in self._files:
            raise refuse(self.path, f"has no tensor {name}")
        return self._files[name].get_tensor(name)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the names and shapes of all tensors; the same before and after training."""
        listed = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(self.shapes.items()))
        return hashlib.sha256(listed.encode()).hexdigest()


def directory(where: str) -> Path:
    """Return the directory of a checkpoint, given itself or as the id of a repository in the local Hugging Face cache.
    Raises PatchError if there is none."""
    path = Path(user_directories.expand(where))
    if path.is_dir():
        return path
    if where.count("/") == 1 and not where.startswith((".", "/", "~")):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(where, local_files_only=True))
        except ImportError:
            pass
        except Exception as error:  # huggingface_hub's errors are many; all mean that it is not there
            raise refuse(
                where,
                f"is neither a directory nor in the local cache ({type(error).__name__})",
                "Download it first; nothing is downloaded here.",
            ) from error
    raise refuse(where, "is not a directory", "Give the directory of a Hugging Face checkpoint.")
