"""Imported by vLLM beside flash-attn; no model of the tests calls it."""


def apply_rotary(*_, **__):
    raise NotImplementedError("FlashAttention's rotary embedding")
