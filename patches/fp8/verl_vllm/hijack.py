"""Let verl load an adapter's tensors if vLLM has renamed what verl calls for it."""

from __future__ import annotations

from typing import Any

from flashpatch.arming.site import Site
from flashpatch.record import Contract, Patch

MAPPER = "vllm.model_executor.models.utils:WeightsMapper"
_OLD, _NEW = "get_unstacked_mapper", "get_rename_mapper"


def on_hijack(original) -> None:
    """Around ``VLLMHijack.hijack``: give vLLM's class the name that verl calls, if it has the function under its new one."""
    mapper = _mapper()
    if not hasattr(mapper, _OLD) and hasattr(mapper, _NEW):
        setattr(mapper, _OLD, getattr(mapper, _NEW))
    return original()


def _undo(site: Site) -> None:
    mapper = _mapper()
    if _OLD in vars(mapper) and vars(mapper)[_OLD] is vars(mapper).get(_NEW):
        delattr(mapper, _OLD)
    site.unwrap()


def _mapper() -> Any:
    from vllm.model_executor.models.utils import WeightsMapper

    return WeightsMapper


PATCH = Patch(
    id="fp8.verl_vllm.hijack",
    targets=("verl.utils.vllm.utils:VLLMHijack.hijack",),
    requires="verl>=0.9",
    wrapper=on_hijack,
    undo=_undo,
    contract=Contract(mentions=("hf_to_vllm_mapper.get_unstacked_mapper",), exists=(MAPPER,)),
    evidence="optional",
    scope=frozenset({"worker"}),
    why="verl 0.9.1 calls get_unstacked_mapper for an adapter's tensors, which vLLM has renamed: each LoRA sync fails.",
    how="Gives the function its old name too.",
    remove_when="verl calls get_rename_mapper.",
)
