"""Where the laboratory keeps its files, and the environment its processes start with."""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
STORE = "FLASHPATCH_LAB_STORE"

#: What makes a tiny engine on a CPU start quickly and answer the same every time.
ENGINE: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engines.open_llm(processes=True) turns it on for one engine
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc and apply_model with a function
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # else the first logprobs compile C++ for 17 s even with enforce_eager
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # on a busy machine two threads spend their time waiting for each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

#: Instead, for engines with enforce_eager=False: really compile (half a minute the first time, then cached).
COMPILED: Mapping[str, str | None] = {"TORCH_COMPILE_DISABLE": None}

#: Instead, for engines with vLLM's second model runner ("V2", its default on GPUs): Triton interprets its kernels.
V2: Mapping[str, str | None] = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "TRITON_INTERPRET": "1",
    "CUDA_VISIBLE_DEVICES": "",  # else vLLM turns Triton off where there is no driver
}

#: Keywords of `engines.open_llm` for an engine that sleeps, its memory pool emulated (`sleep_pool`).
SLEEPING: Mapping[str, str] = {"worker_cls": "sleep_worker.PooledWorker"}


@functools.cache
def avx512() -> bool:
    """Whether this CPU has AVX-512. Without, vLLM packs no bf16 weights and has no 4-bit kernel."""
    return " avx512f " in Path("/proc/cpuinfo").read_text()


@functools.cache
def vnni() -> bool:
    """Whether this CPU adds int8 products in 32 bits. Without, oneDNN's int8 kernels are inexact."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512_vnni" in flags or "avx_vnni" in flags


@functools.cache
def packed_ops() -> bool:
    """Whether vLLM takes its library with operators on packed weights: the one for AVX-512 with bf16 products."""
    return " avx512_bf16 " in Path("/proc/cpuinfo").read_text()


@functools.cache
def amx() -> bool:
    """Whether this CPU multiplies tiles. With, vLLM keeps int8 weights packed in parameters, not in handles."""
    return " amx_tile " in Path("/proc/cpuinfo").read_text()


@functools.cache
def store() -> Path:
    """A directory for models, oracle answers, logs and vLLM's own cache.

    Temporary, one per test session (child processes share it), unless $FLASHPATCH_LAB_STORE names one to
    keep. A kept one has a subdirectory per version of the laboratory's sources, so it is never stale."""
    kept = os.environ.get(STORE)
    if kept is None:
        kept = os.environ[STORE] = tempfile.mkdtemp(prefix="flashpatch-lab-")
        atexit.register(_remove, kept, os.getpid())
    sources = b"".join(file.read_bytes() for file in sorted(HERE.glob("*.py")))
    directory = Path(kept) / hashlib.sha256(sources).hexdigest()[:12]
    if not directory.exists():
        # what vLLM finds out about a model's class, in ten seconds
        inspected = Path(sys.prefix) / "modelinfos"
        inspected.mkdir(exist_ok=True)
        cache = directory / "vllm-cache"
        cache.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (cache / "modelinfos").symlink_to(inspected)
    return directory


def early_paths(env: Mapping[str, str | None]) -> list[Path]:
    """Directories that must be on the path before vLLM is imported, for an engine with these variables.

    vLLM turns Triton off where its version names a CPU. For V2 one of them holds metadata of a distribution "vllm",
    which vLLM asks before its own, "vllm-cpu". It also names the platform, as vLLM 0.24 and 0.27 know that by the version
    alone, and not by VLLM_TARGET_DEVICE."""
    if any(env.get(name) != value for name, value in V2.items()):
        return []
    directory = store() / "second-runner"
    number = importlib.metadata.version("vllm-cpu").partition("+")[0]
    about = directory / f"vllm-{number}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n",
        "entry_points.txt": "[vllm.platform_plugins]\nlab_cpu = vllm_lab.environment:platform\n",
    }.items():
        draft = about / f"{name}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(about / name)
    return [directory]


def platform() -> str:
    """Return the class of vLLM's platform, as a plugin of vLLM's."""
    return "vllm.platforms.cpu.CpuPlatform"


def clean(*, paths: tuple[Path, ...] = (), standin: bool = False, **extra: str | None) -> dict[str, str]:
    """This process's environment without FlashPatch, ready for an engine; in `extra` None removes a variable.

    `paths` go first on PYTHONPATH. `standin=True` loads the fp8 stand-in in every process of the engine."""
    keep = {
        name: value
        for name, value in os.environ.items()
        if name == STORE or not name.startswith("FLASHPATCH")
    }
    where = [*paths, HERE.parent, *([HERE / "plugin"] if standin else []), *early_paths(extra)]
    wanted: dict[str, str | None] = {
        **keep,
        **ENGINE,
        STORE: str(store().parent),
        "VLLM_CACHE_ROOT": str(store() / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(store() / "inductor-cache"),
        "PYTHONPATH": os.pathsep.join([*map(str, where), *filter(None, [keep.get("PYTHONPATH")])]),
        **extra,
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child leaves it alone
        shutil.rmtree(directory, ignore_errors=True)
