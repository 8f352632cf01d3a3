"""What FlashPatch costs: the start of a Python process, used or not, and the imports of a worker.

    python benchmarks/startup.py [--runs 400] [--families fp8,flowrl,...] [--imports 3]

Two fresh environments, equal but for the installed wheel, start interpreters in turns: medians of wall time and
minima of processor time are compared, and imported modules counted. Then the running environment imports what
a worker imports (those of WORKERS that are installed), switched off, switched on without kept verdicts, and
with them; minima of processor time. On a machine with other work these differ by more than FlashPatch costs, so
the time in its import hooks is taken within the process as well, and is what the aims are held against; imports
that the hooks bring forward count as theirs. Needs pip and setuptools in the running environment.

Aims: less than 0.5 ms where FLASHPATCH is unset and 15 ms where it is set; 10 % of a worker's imports without
kept verdicts, 2 % with them."""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import quick

AIM_OFF_MS, AIM_ON_MS = 0.5, 15.0
AIM_COLD, AIM_WARM = 0.10, 0.02
TREE = Path(__file__).resolve().parents[1]
WORKERS = {
    "vLLM": ("vllm", "vllm.v1.engine.core, vllm.v1.worker.{}_worker"),
    "verl": ("verl", "verl.workers.engine_workers"),
}
IN_HOOKS = """
import os, time
from flashpatch.arming import import_hooks as hooks
take, spent, depth = hooks._take, 0.0, 0
def timed(callback):
    def call(module):
        global spent, depth
        depth += 1
        begin = time.thread_time()
        try:
            callback(module)
        finally:
            depth -= 1
            spent += 0.0 if depth else time.thread_time() - begin
    return call
hooks._take = lambda name: [timed(callback) for callback in take(name)]
{}
with open(os.environ["SPENT"], "w") as file:
    print(spent / (time.process_time() - spent), file=file)
"""
COUNT = "import sys; print(len(sys.modules))"


def environment(home: Path) -> Path:
    """A new environment that can import the running one's packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def milliseconds(python: Path, env: dict[str, str], code: str = "pass") -> tuple[float, float]:
    """Wall and processor time of one process; -I leaves PYTHON* variables and the user's site directory out."""
    begin = time.perf_counter()
    process = os.posix_spawn(python, [python, "-I", "-c", code], env)
    _, status, used = os.wait4(process, 0)
    if status:
        raise SystemExit(f"{python} failed: wait status {status}")
    return (time.perf_counter() - begin) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def bare_start(runs: int) -> None:
    """Print what a process pays that never imports a framework."""
    with tempfile.TemporaryDirectory() as folder:
        without, with_it = environment(Path(folder, "without")), environment(Path(folder, "with"))
        pip = [sys.executable, "-m", "pip", "--python", with_it, "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", TREE], check=True)
        on = {"FLASHPATCH_LEDGER": f"{folder}/ledger", "FLASHPATCH_CACHE": f"{folder}/cache"}
        kinds = {
            "not installed": (without, {}),
            "FLASHPATCH unset": (with_it, {}),
            "FLASHPATCH=fp8": (with_it, {"FLASHPATCH": "fp8", **on}),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for turn in range(runs + 10):
            for name, (python, env) in kinds.items():
                taken = milliseconds(python, env)
                if turn >= 10:  # the first turns compile bytecode and fill the page cache
                    times[name].append(taken)
        counts = {
            name: subprocess.check_output([python, "-I", "-c", COUNT], env=env, text=True).strip()
            for name, (python, env) in kinds.items()
        }
    walls = {name: median(wall for wall, _ in taken) for name, taken in times.items()}
    used = {name: min(cpu for _, cpu in taken) for name, taken in times.items()}
    base = "not installed"
    for name in kinds:
        print(
            f"{name:17} median {walls[name]:7.2f} ms {walls[name] - walls[base]:+7.2f} ms   "
            f"processor {used[name]:7.2f} ms {used[name] - used[base]:+7.2f} ms   modules {counts[name]:>4}"
        )
    judge("cost when unset", walls["FLASHPATCH unset"] - walls[base], AIM_OFF_MS, "ms")
    judge("cost when set, processor time", used["FLASHPATCH=fp8"] - used["FLASHPATCH unset"], AIM_ON_MS, "ms")


def worker_imports(runs: int, families: str) -> None:
    """Print what the imports of a worker cost more."""
    device = "gpu" if Path("/dev/nvidia0").exists() else "cpu"
    for name, (package, modules) in WORKERS.items():
        if find_spec(package) is None:
            print(f"{name} is not installed")
            continue
        code = f"import {modules.format(device)}"
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")
            home = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", folder)}
            on = {**home, "FLASHPATCH": families, "FLASHPATCH_LEDGER": f"{folder}/ledger"}
            on |= {"FLASHPATCH_CACHE": str(cache), "SPENT": f"{folder}/spent"}
            share = dict.fromkeys(("cold", "warm"), float("inf"))
            least = dict.fromkeys(("off", "cold", "warm"), float("inf"))
            milliseconds(Path(sys.executable), on, code)  # bytecode and page cache
            for _ in range(runs):
                for kind in least:
                    if kind == "cold":
                        shutil.rmtree(cache)
                    env, run = (home, code) if kind == "off" else (on, IN_HOOKS.format(code))
                    _, cpu = milliseconds(Path(sys.executable), env, run)
                    least[kind] = min(least[kind], cpu)
                    if kind in share:
                        share[kind] = min(share[kind], float(Path(on["SPENT"]).read_text()))
        taken = ", ".join(
            f"{kind} {ms / 1e3:.2f} s ({ms / least['off'] - 1:+.1%})" for kind, ms in least.items()
        )
        print(f"{name} with {families}: {taken}")
        judge(f"{name}, in hooks, without kept verdicts", share["cold"], AIM_COLD)
        judge(f"{name}, in hooks, with kept verdicts", share["warm"], AIM_WARM)


def judge(what: str, value: float, aim: float, unit: str = "") -> None:
    """Print a result beside its aim; without a unit both are shares."""
    text = f"{value:.2f} {unit}, aim under {aim} {unit}" if unit else f"{value:+.1%}, aim under {aim:.0%}"
    print(f"{what}: {text}: {'met' if value < aim else 'missed'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400, help="starts of each kind (default %(default)s)")
    parser.add_argument("--imports", type=int, default=3, help="imports of each kind (default %(default)s)")
    parser.add_argument("--families", default="fp8", help="what is on in them (default %(default)s)")
    given = quick.parse(parser, runs=3, imports=1)
    if given.runs:
        bare_start(given.runs)
    if given.imports:
        worker_imports(given.imports, given.families)


if __name__ == "__main__":
    main()
