"""Let a bucket of an update hold a tied tensor without the one that it is tied to."""

from __future__ import annotations

from typing import Any

from flashpatch.arming.site import Site
from flashpatch.patches.fp8.refit import model_registry
from flashpatch.record import Contract, Patch


def on_check(original, self, autoloaded_weights: set[str], *args: Any, **kwargs: Any):
    """Around ``AutoWeightsLoader._check_skipped_aliases``: leave the buckets of an update to the update.

    What an update lacks in the end is found when it is committed, which then fails and names it.
    """
    for managed in model_registry.all_models():
        if managed.inside_load and managed.state != "loading":
            return None
    return original(self, autoloaded_weights, *args, **kwargs)


_LOADER = "vllm.model_executor.models.utils:AutoWeightsLoader"


def native(site: Site) -> str | None:
    """Return what needs no patch: vLLM 0.28's loader checks nothing of the kind."""
    return "a loader without that check" if site.target.endswith(".load_weights") else None


PATCH = Patch(
    id="fp8.vllm.check_skipped_aliases",
    targets=(f"{_LOADER}._check_skipped_aliases", f"{_LOADER}.load_weights"),
    requires="vllm>=0.24",
    wrapper=on_check,
    native=native,
    contract=Contract(exists=(f"{_LOADER}.load_weights",)),
    evidence="optional",  # models of their own loaders never ask
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.initialize_model",),
    why="Trainers send lm_head of a tied model too, often in the last bucket; vLLM refuses a load that has it without the "
    "embedding, though the embedding came in an earlier bucket.",
    how="Skips vLLM's check within an update, whose own completeness is checked at its end.",
    remove_when="vLLM checks a whole update rather than one call of load_weights.",
)
