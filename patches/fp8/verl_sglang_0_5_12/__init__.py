"""Run verl on SGLang 0.5.12 to 0.5.20. It goes when verl, whose 0.9.1 pins 0.5.12, pins a newer SGLang than these.

These patches are in the place of those in `verl_sglang`, which are for newer versions."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.verl_sglang_0_5_12 import client, server

PATCHES = collected(server, client)
