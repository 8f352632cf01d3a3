"""Carry kept tokens through verl: from the server through agent loops and the transfer queue to the FSDP actor."""

from __future__ import annotations

from flashpatch.patches.fp8.verl.support import actor, agent_loop

PATCHES = (agent_loop.PATCH, actor.OUTPUTS, actor.LOGPROBS)
