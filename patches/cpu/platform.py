"""Register a platform without an accelerator with verl's own registry."""

from __future__ import annotations

import sys
from typing import Any

from flashpatch.patches.cpu import accelerator
from flashpatch.record import Contract, Patch

MANAGER = "verl.plugin.platform.platform_manager"


def native(site: Any) -> str | None:
    """Name verl's own CPU platform, once it has one."""
    theirs = site.owner.get("cpu")
    return None if theirs is None or _ours(theirs) else f"{theirs.__module__}.{theirs.__qualname__}"


def apply(site: Any) -> None:
    """Register the platform; verl detects it after those of accelerators."""
    accelerator.refuse(site.patch.id)
    from flashpatch.patches.cpu.device import PlatformCPU

    site.owner.register(platform="cpu")(PlatformCPU)


def undo(site: Any) -> None:
    """Remove the platform, and let verl detect again if it had chosen it."""
    site.owner._platforms.pop("cpu", None)
    module = sys.modules[MANAGER]
    if module._current_platform is not None and _ours(type(module._current_platform)):
        module._current_platform = None


def too_late() -> str | None:
    """Return a sentence when verl chose another platform before the family was enabled."""
    chosen = getattr(sys.modules.get(MANAGER), "_current_platform", None)
    if chosen is None or _ours(type(chosen)):
        return None
    return f"verl has settled on the platform {chosen.vendor_name} already; enable cpu before importing verl."


def _ours(platform: type) -> bool:
    return platform.__module__ == "flashpatch.patches.cpu.device"


PATCH = Patch(
    id="cpu.verl.register_platform",
    targets=(f"{MANAGER}:PlatformRegistry.register",),
    requires="verl>=0.9",
    apply=apply,
    undo=undo,
    native=native,
    contract=Contract(
        params=("platform",),
        mentions=("cls._platforms",),
        exists=(
            f"{MANAGER}:PlatformRegistry.get",
            f"{MANAGER}:_current_platform",
            "verl.plugin.platform.platform_base:PlatformBase.ray_resource_options",
            "verl.plugin.platform.platform_base:PlatformBase.is_ipc_supported",
            "verl.plugin.platform.platform_base:PlatformBase.rollout_env_vars",
        ),
    ),
    evidence="install",
    scope=frozenset({"driver", "trainer", "worker"}),
    why="verl knows the platforms nvidia, huawei and amd; if it finds none it assumes nvidia and fails "
    "on the first torch.cuda call.",
    how="Registers a CPU platform with verl's registry, which detects it after those of accelerators: gloo, "
    'weights through shared memory, Ray\'s resource "GPU" as a slot for one training rank.',
    remove_when="verl registers a CPU platform of its own.",
)
