"""Run verl on SGLang: start its servers, update their weights in one session per sync, return what was committed.

These patches are a group of their own: they are checked when verl imports its code for SGLang, so that a job with
vLLM does not depend on the SGLang that may be installed beside it."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.verl_sglang import http_engine, http_server, server_adapter

PATCHES = collected(http_server, http_engine, server_adapter)
