"""The part that all records for SGLang 0.5.12 have in common."""

from __future__ import annotations

from functools import partial

from flashpatch.patches.fp8.sglang import initialize_model
from flashpatch.record import Patch

FRAMEWORK = "fp8.sglang_0_5_12"
"""Beginning of the ids."""

REQUIRES = "sglang>=0.5.12,<0.5.13"

for_old_sglang = partial(Patch, requires=REQUIRES, remove_when=initialize_model.PATCH.remove_when)
