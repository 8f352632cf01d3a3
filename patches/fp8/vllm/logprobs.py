"""Make engines return logprobs of the distribution that tokens were sampled from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashpatch import ledger
from flashpatch.patches.fp8.vllm import int8_config


def configure(args: Any, options: Mapping[str, Any]) -> None:
    """Set ``logprobs_mode`` if it is at vLLM's default, and the head's dtype if requested.

    An importance ratio needs the probability with which a token was sampled: after temperature, top-k and
    top-p. vLLM's default are logprobs before them.

    Args:
        args: ``vllm.engine.arg_utils.EngineArgs``, changed in place.
        options: the family's.
    """
    if options["logprobs"] == "processed" and args.logprobs_mode == "raw_logprobs":
        args.logprobs_mode = "processed_logprobs"
    if options["lm_head"] == "float32":
        _use_float32_head(args)
        ledger.note(lm_head="float32")
    ledger.note(logprobs=args.logprobs_mode)


def _use_float32_head(args: Any) -> None:
    """Set vLLM's ``head_dtype``; before 0.26 `vllm_0_24` does it."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if hasattr(LogitsProcessor, "_apply_head"):
        int8_config.override(args, "head_dtype", "float32")
