"""Audit the weights that verl's worker of vLLM receives.

A group of its own, checked when verl imports its code for vLLM: a job with another engine needs no vLLM.
"""

from __future__ import annotations

from flashpatch.patches.fsdp.verl_vllm import receiver

PATCHES = (receiver.PATCH,)
"""The patches of this group."""
