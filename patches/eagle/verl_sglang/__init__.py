"""Reach SGLang's schedulers from verl's driver, and count accepted drafts under SGLang's names for them.

A group of its own, checked when verl imports its code for SGLang.
"""

from __future__ import annotations

from flashpatch.patches.eagle.verl_sglang import http_server, spec_metrics

PATCHES = (http_server.PATCH, spec_metrics.PATCH)
