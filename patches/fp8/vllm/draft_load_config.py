"""Load a pretrained drafter from its checkpoint if the policy's own weights are dummies.

Trainers open engines with ``load_format="dummy"``, since their first update brings the policy. vLLM uses the same
format for the drafter, whose weights no update brings: it would stay random.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from flashpatch.record import Contract, Patch

logger = logging.getLogger("flashpatch.fp8")

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def on_get_model(
    original, *, vllm_config: Any, model_config: Any = None, load_config: Any = None, **kwargs: Any
):
    """Around ``get_model``: choose the load format of a drafter."""
    from flashpatch.patches.fp8.vllm import loader_adapter

    chosen = model_config or vllm_config.model_config
    if loader_adapter.is_drafter(vllm_config, chosen):
        load_config = _of_drafter(vllm_config, chosen, load_config)
    return original(vllm_config=vllm_config, model_config=model_config, load_config=load_config, **kwargs)


def _of_drafter(vllm_config: Any, model_config: Any, load_config: Any) -> Any:
    """Return the drafter's ``LoadConfig``: the user's if one is set, else never dummies for a pretrained one."""
    speculative = vllm_config.speculative_config
    if speculative.draft_load_config is not None:
        return load_config or speculative.draft_load_config
    inherited = load_config or vllm_config.load_config
    if inherited.load_format != "dummy" or not _pretrained(model_config, speculative.target_model_config):
        return load_config
    logger.info("load_format='dummy' is for the policy: the drafter is loaded from %s", model_config.model)
    own = copy.copy(inherited)
    own.load_format = "auto"
    return own


def _pretrained(drafter: Any, target: Any) -> bool:
    """Whether a drafter has a checkpoint of its own. One inside the target's checkpoint is updated with the target."""
    if target is not None and drafter.model == target.model:
        return False
    folder = Path(drafter.model)
    return not folder.is_dir() or any(next(folder.glob(pattern), None) for pattern in _WEIGHTS)


PATCH = Patch(
    id="fp8.vllm.get_model",
    targets=("vllm.model_executor.model_loader:get_model",),
    requires="vllm>=0.24",
    wrapper=on_get_model,
    contract=Contract(
        params=("vllm_config", "model_config", "load_config"),
        exists=(
            "vllm.config.speculative:SpeculativeConfig.draft_load_config",
            "vllm.config.speculative:SpeculativeConfig.draft_model_config",
            "vllm.config.speculative:SpeculativeConfig.target_model_config",
        ),
    ),
    evidence="optional",  # an engine may have no drafter
    scope=frozenset({"worker"}),
    needs=("fp8.vllm.initialize_model",),
    why="With load_format='dummy', as trainers open engines, a pretrained drafter is never loaded: no update of the "
    "policy brings it. A speculative config's draft_load_config is ignored for draft models.",
    how="Loads a drafter with a checkpoint of its own from there, or as draft_load_config says.",
    remove_when="vLLM keeps load_format='dummy' from pretrained drafters, and heeds draft_load_config for all methods.",
)
