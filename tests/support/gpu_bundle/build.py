"""Pack the CUDA build of vLLM or SGLang, and what it imports, into parts that install beside torch without a network.

    ENVIRONMENT/bin/python tests/support/gpu_bundle/build.py FOLDER

ENVIRONMENT has one of them installed, and all that it imports; nothing is downloaded. `install.py` beside this file installs
parts. Libraries are reduced to compute capability 9.0."""

import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import prune

CAPABILITY = 90
MOST = 55_000_000  # bytes of a part, which travels beside the tree
ATTENTION, EXPERTS = ("_vllm_fa3_C",), ("_moe_C_stable_libtorch",)  # of vLLM, in parts of their own
FLASH = ("sgl_kernel/flash_ops",)  # of SGLang, likewise
REDUCED = (*ATTENTION, *EXPERTS, "vllm/_C_stable_libtorch", "_flashmla_C", "_qutlass_C")
REDUCED += (*FLASH, "sgl_kernel/sm90/common_ops")
# Not all: what patchelf has altered does not load afterwards.
STRIPPED = ("libxgrammar_bindings", "libllvmlite")
LEFT_OUT = (  # other capabilities, other Pythons, servers in Rust and of Ray; what is only compiled or tested
    *("_vllm_fa2_C", "vllm-rs", "third_party/fmha_sm100", "cpython-310-", "cpython-311-", "cpython-313-"),
    *("ray/jars/", "ray/dashboard/client/", "ray/rllib/"),
    *("cpython-314-", "__pycache__", "/tests/", "libxgrammar.a"),
    *("sgl_kernel/sm100/", "sgl_kernel/flashmla", "libmscclpp", "mscclpp_nccl"),
    *("flashinfer_cubin/cubins/", "flashinfer/data/"),
)
SMALL = """
httpx2 httpcore2 truststore opentelemetry-proto opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai python-dateutil
anyio apache-tvm-ffi cachetools cbor2 compressed-tensors diskcache dill einops email-validator fastapi httpcore httpx
jmespath jsonschema jsonschema-specifications lark llguidance loguru msgspec nvidia-ml-py openai openai-harmony
opentelemetry-api partial-json-parser py-cpuinfo pybase64 pydantic pydantic-core pydantic-extra-types python-multipart pyzmq
referencing rpds-py sniffio starlette typing-inspection uvloop wrapt xgrammar annotated-types annotated-doc
"""
VERL = "antlr4-python3-runtime codetiming colorful omegaconf orjson pyvers ray tensordict verl"
RAY = ("ray/core/src/",)  # its servers, in the part of whole jobs
JOBS = """
anthropic astor blake3 cwevals datasets depyf distro docstring-parser googleapis-common-protos hydra-core ijson importlib-metadata
interegular jiter lazy-importer lm-format-enforcer mcp mcp-types model-hosting-container-standards multiprocess outlines-core
prometheus-fastapi-instrumentator pyjwt pylatexenc python-json-logger setproctitle sse-starlette supervisor torchdata uvicorn
watchfiles TransferQueue qwen-vl-utils mathruler zipp opencensus opencensus-context aiohttp-cors smart-open
"""
COMMON = """
accelerate aiohappyeyeballs aiohttp aiosignal attrs certifi charset-normalizer click cloudpickle frozenlist h11 huggingface_hub
idna jinja2 msgpack multidict numpy packaging pillow prometheus_client propcache protobuf psutil pygments
pyyaml regex requests rich safetensors sentencepiece tiktoken tokenizers tqdm transformers urllib3 xxhash yarl
"""
# What SGLang imports; of FlashInfer only what needs no compiler, and CuTe for its norms.
SGLANG = """
sglang sglang-kernel flashinfer-python flashinfer-cubin transformers tokenizers annotated-types apache-tvm-ffi compressed-tensors
dill distro fastapi gguf ipython jsonschema jsonschema-specifications kernels loguru msgspec openai opentelemetry-api orjson
partial-json-parser pybase64 pydantic pydantic-core pydantic-extra-types python-multipart pyzmq referencing rpds-py
setproctitle sniffio starlette torch_memory_saver traitlets typing-inspection uvicorn watchfiles xgrammar
"""
CUTE = "nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, members in (of_sglang() if find_spec("sglang") else of_vllm()).items():
        pack(folder / f"{name}.tar.xz", members)


def of_vllm() -> dict[str, list[tuple[str, Path]]]:
    vllm = list(files("vllm"))
    return {
        "engine": [file for file in vllm if not is_one_of(file[0], ATTENTION + EXPERTS)] + of(SMALL),
        "attention": [file for file in vllm if is_one_of(file[0], ATTENTION)],
        "experts": [file for file in vllm if is_one_of(file[0], EXPERTS)]
        + [file for file in of(VERL) if not is_one_of(file[0], RAY)],
        "jobs": [file for file in files("ray") if is_one_of(file[0], RAY)] + of(JOBS),
        "common": of(COMMON),  # what images with torch often have; what is there in another version stays
        "numba": of("numba llvmlite"),  # likewise
    }


def of_sglang() -> dict[str, list[tuple[str, Path]]]:
    every = of(SGLANG)
    return {
        "sglang": [file for file in every if not is_one_of(file[0], FLASH)],
        "flash": [file for file in every if is_one_of(file[0], FLASH)],
        "cute": of(CUTE),
    }


def files(name: str) -> Iterator[tuple[str, Path]]:
    """Yield what a distribution has installed: its name in a part, and where it is."""
    found = distribution(name)
    at = f"{found.metadata['Name']}=={found.version}"
    for file in found.files or ():
        if not str(file).startswith("..") and not is_one_of(str(file), LEFT_OUT):
            yield f"{at}/{file}", Path(str(found.locate_file(file)))


def of(names: str) -> list[tuple[str, Path]]:
    return [file for name in names.split() for file in files(name)]


def is_one_of(path: str, words: tuple[str, ...]) -> bool:
    return any(word in path for word in words)


def pack(part: Path, members: list[tuple[str, Path]]) -> None:
    """Write a part; libraries with GPU code go reduced."""
    with part.open("wb") as out, tempfile.TemporaryDirectory() as folder:
        xz = subprocess.Popen(["xz", "-T0", "-9e", "-c"], stdin=subprocess.PIPE, stdout=out)
        with tarfile.open(fileobj=xz.stdin, dereference=True, mode="w|") as archive:
            for name, path in members:
                small = Path(folder, path.name)
                if is_one_of(name, REDUCED):
                    prune.reduce(path, small, CAPABILITY)
                elif is_one_of(name, STRIPPED):  # of their symbols, half of some
                    subprocess.run(["strip", "--strip-unneeded", "-o", small, path], check=True)
                else:
                    small = path
                archive.add(small, name)
        xz.stdin.close()
        if xz.wait():
            sys.exit(f"xz cannot write {part}")
    size = part.stat().st_size
    print(f"{part.name}: {size / 1e6:.1f} MB, {len(members)} files", flush=True)
    if size > MOST:
        sys.exit(f"{part} has more than {MOST / 1e6:.0f} MB: move something into another part")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
