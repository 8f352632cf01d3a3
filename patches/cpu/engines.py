"""Register verl's FSDP engines for the CPU with verl's own registry."""

from __future__ import annotations

from typing import Any

from flashpatch.record import Contract, Patch

IMPL = "verl.workers.engine.fsdp.transformer_impl"
ENGINES = (("language_model", "FSDPEngineWithLMHead"), ("value_model", "FSDPEngineWithValueHead"))
BACKENDS = ("fsdp", "fsdp2")


def native(site: Any) -> str | None:
    """Name verl's own registration, once it has one."""
    known = _registry(site)._engines.get("language_model", {}).get("fsdp", {}).get("cpu")
    return None if known is None else f"{known.__module__}.{known.__qualname__}"


def apply(site: Any) -> None:
    """Register both engines for the device "cpu"."""
    for model_type, name in ENGINES:
        engine_class = getattr(site.module, name)
        _registry(site).register(model_type=model_type, backend=list(BACKENDS), device="cpu")(engine_class)


def undo(site: Any) -> None:
    """Remove them from the registry."""
    for model_type, _ in ENGINES:
        for backend in BACKENDS:
            _registry(site)._engines[model_type][backend].pop("cpu", None)


def _registry(site: Any) -> Any:
    return site.module.EngineRegistry


PATCH = Patch(
    id="cpu.verl.fsdp_engine_with_lm_head",
    targets=(f"{IMPL}:FSDPEngineWithLMHead",),
    requires="verl>=0.9",
    apply=apply,
    undo=undo,
    native=native,
    contract=Contract(
        exists=(
            f"{IMPL}:FSDPEngineWithValueHead",
            f"{IMPL}:EngineRegistry",
            "verl.workers.engine.base:EngineRegistry.register",
            "verl.workers.engine.base:EngineRegistry._engines",
        ),
    ),
    evidence="install",
    scope=frozenset({"trainer"}),
    needs=("cpu.verl.register_platform",),
    why="verl registers its FSDP engines for cuda and npu only, though nothing in them needs either.",
    how="Registers the same two classes for cpu.",
    remove_when="verl registers them for cpu.",
)
