"""Run verl on vLLM: detect failed peers in a weight transfer, return what each worker committed.

These patches are a group of their own, checked when verl imports its code for vLLM: a job with another engine needs no
vLLM."""

from __future__ import annotations

from flashpatch.decorate import collected
from flashpatch.patches.fp8.verl_vllm import http_server, trainer, worker

PATCHES = collected(trainer, worker, http_server)
