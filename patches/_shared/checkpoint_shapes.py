"""Read the shapes of a checkpoint's tensors."""

from __future__ import annotations

from pathlib import Path


def files(path: Path) -> list[Path]:
    """Return a directory's safetensors files, or the file that ``path`` is; none if there is no such thing."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of each tensor, by name, from the files' headers."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in files(path):
        with safe_open(file, framework="pt") as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    return found
