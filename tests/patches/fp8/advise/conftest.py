"""Skip tests of the advisor where torch or transformers is missing."""

from __future__ import annotations

from importlib.util import find_spec

if not all(map(find_spec, ("torch", "transformers", "safetensors"))):
    collect_ignore_glob = ["test_*.py"]
