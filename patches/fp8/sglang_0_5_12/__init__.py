"""Update weights on SGLang 0.5.12 to 0.5.20. It goes when verl, whose 0.9.1 pins 0.5.12, pins a newer SGLang than these.

SGLang has no update sessions there: each bucket is a request. A sender that opens a session by name (`sglang_sessions`), as
FlashPatch's part of verl's client does, ends it by name; without one an update is over when everything has come."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.sglang_0_5_12 import arguments, model, processes, scheduler

PATCHES = collected(arguments, model, scheduler, processes)
