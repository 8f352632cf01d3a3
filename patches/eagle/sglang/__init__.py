"""The family on SGLang's engine."""

from __future__ import annotations

from flashpatch.patches.eagle.sglang import capture, switch, sync

PATCHES = (*capture.PATCHES, *switch.PATCHES, *sync.PATCHES)
