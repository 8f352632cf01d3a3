"""Build the fake CUDA device for the environment of this interpreter, and let its processes find it.

    .venv-cuda/bin/python tests/support/fake_cuda/build.py

Needs gcc and the packages that come with a CUDA wheel of torch, whose headers and symbol lists it uses. The libraries go
to `fake_cuda` in the environment's folder; a `.pth` file lets a process with FAKE_CUDA=1 redirect torch's operators."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
OUT = Path(sys.prefix) / "fake_cuda"
SITE = Path(sysconfig.get_path("purelib"))
VERSION_SCRIPT = "libcudart.so.{major} {{ global: *; }};\n"
MISSING = (
    '__attribute__((visibility("default"))) int {name}(void) {{ return fake_cuda_missing("{name}"); }}\n'
)


def run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def compile_shared(
    name: str, *sources: Path, soname: str = "", compiler: str = "gcc", extra: tuple = ()
) -> None:
    flags = ["-O1", "-fPIC", "-w", "-shared", *([f"-Wl,-soname,{soname}"] if soname else [])]
    run(compiler, *flags, *sources, *extra, "-o", OUT / name)


def symbols(*arguments: object) -> set[str]:
    """Names of the functions that `nm` finds, versions cut off."""
    lines = (line.split() for line in run("nm", *arguments).splitlines())
    return {line[-1].partition("@")[0] for line in lines if len(line) >= 2 and line[-2] in "TW"}


def runtime(nvidia: Path) -> None:
    """libcudart: our functions, and for each other one of the real library a caller of `fake_cuda_missing`."""
    (real,) = nvidia.glob("lib/libcudart.so.[0-9]*")
    major = real.name.rpartition(".")[2]
    objects = []
    for name in ("memory", "properties", "streams", "graphs", "kernels"):
        objects.append(OUT / f"{name}.o")
        source = HERE / "device" / f"{name}.c"
        options = ("-O1", "-fPIC", "-w", "-fvisibility=hidden", f"-I{nvidia}/include")
        run("gcc", *options, "-c", source, "-o", objects[-1])
    missing = sorted(symbols("-D", "--defined-only", real) - symbols(*objects))
    text = "int fake_cuda_missing(const char *);\n" + "".join(MISSING.format(name=name) for name in missing)
    (OUT / "missing.c").write_text(text)
    (OUT / "versions").write_text(VERSION_SCRIPT.format(major=major))
    script = f"-Wl,--version-script,{OUT / 'versions'}"
    compile_shared(real.name, *objects, OUT / "missing.c", soname=real.name, extra=(script, "-lpthread"))
    link("libcudart.so", real.name)


def link(name: str, target: str) -> None:
    (OUT / name).unlink(missing_ok=True)
    (OUT / name).symlink_to(target)


def driver(nvidia: Path) -> None:
    """libcuda: our functions, and for each other one of the header one that says it is not supported."""
    device = HERE / "device"
    objects = []
    for name in ("driver", "driver_kernels"):
        objects.append(OUT / f"{name}.o")
        run("gcc", "-O1", "-fPIC", "-w", f"-I{nvidia}/include", "-c", device / f"{name}.c", "-o", objects[-1])
    header = run("gcc", "-E", "-P", nvidia / "include/cuda.h")
    missing = sorted(set(re.findall(r"\bCUresult\s+(cu\w+)\s*\(", header)) - symbols(*objects))
    (OUT / "missing_driver.c").write_text("".join(f"int {one}(void) {{ return 801; }}\n" for one in missing))
    compile_shared("libcuda.so.1", *objects, OUT / "missing_driver.c", soname="libcuda.so.1", extra=("-ldl",))
    link("libcuda.so", "libcuda.so.1")
    compile_shared("libnvidia-ml.so.1", device / "nvml.c", soname="libnvidia-ml.so.1")


def redirection() -> None:
    torch = SITE / "torch"
    headers = (torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    libraries = (f"-L{torch}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch}/lib")
    extra = ("-std=c++20", *(f"-I{path}" for path in headers), *libraries)
    compile_shared("fake_cuda_redirect.so", HERE / "device" / "redirect.cpp", compiler="g++", extra=extra)


def front_door() -> None:
    """Lets every process of the environment that has FAKE_CUDA=1 redirect torch's operators once torch is imported."""
    start = "import os; os.environ.get('FAKE_CUDA') and __import__('fake_cuda.start')"
    lines = (str(OUT), str(HERE.parent), start)
    (SITE / "fake_cuda.pth").write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    found = [path for path in (SITE / "nvidia").glob("cu*") if (path / "include/cuda_runtime_api.h").exists()]
    if not found:
        sys.exit(
            f"no CUDA headers under {SITE}/nvidia: install a CUDA build of torch, and nvidia-cuda-crt if it is separate"
        )
    OUT.mkdir(exist_ok=True)
    runtime(found[0])
    driver(found[0])
    redirection()
    front_door()


if __name__ == "__main__":
    main()
