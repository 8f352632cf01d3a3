"""Read a Hugging Face checkpoint in safetensors, one tensor at a time, offline."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import user_directories
from flashpatch.patches.fp8.calibration import untrusted
from flashpatch.patches.fp8.calibration.untrusted import refuse

if TYPE_CHECKING:
    import torch

_SHARD_LIMIT = 1 << 46
_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class Checkpoint:
    """List what a checkpoint holds, without loading it.

    Args:
        where: a directory, or the id of a repository in the local Hugging Face cache.

    Attributes:
        path: the directory.
        config: ``config.json``.
        shapes: tensor name to shape.

    Raises:
        PatchError: no such checkpoint here, not in safetensors, or hostile: an index that leads out of the
            directory, shards without the tensors the index promises, absurd names or headers."""

    def __init__(self, where: str) -> None:
        self.path = directory(where)
        self.config = untrusted.json_object(self.path / "config.json")
        self._open = ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file, promised in self._shards():
            self._admit(file, promised)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor as stored, on the CPU. Raises PatchError: there is none, or it cannot be read."""
        from safetensors import SafetensorError

        if name not in self._files:
            raise refuse(self.path, f"has no tensor {name}")
        file, opened = self._files[name]
        try:
            return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise refuse(file, f"tensor {name} cannot be read ({error})") from error

    def fingerprint(self) -> str:
        """Return the SHA-256 of the names and shapes of all tensors; the same before and after training."""
        listed = "\n".join(f"{name} {list(shape)}" for name, shape in sorted(self.shapes.items()))
        return hashlib.sha256(listed.encode()).hexdigest()

    def _shards(self) -> Iterator[tuple[Path, list[str] | None]]:
        index = self.path / _INDEX
        if (self.path / _ONE_FILE).exists():
            yield self.path / _ONE_FILE, None
        elif index.exists():
            held: dict[str, list[str]] = {}
            weight_map = untrusted.json_object(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise refuse(index, "has no weight_map")
            for name, file in weight_map.items():
                held.setdefault(untrusted.file_name(file, index), []).append(
                    untrusted.tensor_name(name, index)
                )
            for file, names in held.items():
                yield self.path / file, names
        else:
            other = next((p.name for p in self.path.iterdir() if p.suffix in (".bin", ".pt", ".pth")), None)
            problem = "holds no model.safetensors" + (
                f" (only {other}, a pickle: not opened)" if other else ""
            )
            raise refuse(self.path, problem, "Save the model with safetensors first.")

    def _admit(self, file: Path, promised: list[str] | None) -> None:
        opened = self._open.enter_context(untrusted.safetensors(file, _SHARD_LIMIT))
        held = set(opened.keys())
        missing = sorted(set(promised or ()) - held)
        if missing:
            raise refuse(file, f"lacks {', '.join(missing[:4])}, which the index says it holds")
        for name in sorted(held) if promised is None else promised:
            self.shapes[untrusted.tensor_name(name, file)] = tuple(opened.get_slice(name).get_shape())
            self._files[name] = file, opened


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
