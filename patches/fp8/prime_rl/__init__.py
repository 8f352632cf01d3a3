"""Patches of prime-rl's rollout workers."""

from flashpatch.patches.fp8.prime_rl import load_weights_kernel

PATCHES = (load_weights_kernel.PATCH,)
