"""Read the shapes of a checkpoint's tensors, and tell it from others."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path


def files(path: Path) -> list[Path]:
    """Return a directory's safetensors files, those its index names if it has one (engines read no others), or the file
    that ``path`` is; none if there is no such thing."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor, by name, from the files' headers."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in files(path):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    return found


def fingerprint(model: Path) -> str:
    """Tell a model in a folder from others by some 256 pieces of each of its files."""
    digest = sha256()
    for path in sorted(model.glob("*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            for at in range(0, size, 1 + size // 256):
                file.seek(at)
                digest.update(file.read(4096))
    return digest.hexdigest()
