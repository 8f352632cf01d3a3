"""Reach vLLM's workers from verl's driver. A group of its own, checked when verl imports its code for vLLM."""

from __future__ import annotations

from flashpatch.patches.eagle.verl_vllm import http_server

PATCHES = (http_server.PATCH,)
