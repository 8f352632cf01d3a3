"""The family on vLLM's V1 engine."""

from __future__ import annotations

from flashpatch.record import Patch

PATCHES: tuple[Patch, ...] = ()
