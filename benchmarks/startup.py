"""What FlashPatch costs the start of a Python process, used or not.

    python benchmarks/startup.py [--runs 400]

Two fresh environments, equal but for the installed wheel, start interpreters in turns; medians are compared.
Aim: less than 0.5 ms where FLASHPATCH is unset. Needs pip and setuptools in the running environment.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from statistics import median

AIM_MS = 0.5
TREE = Path(__file__).resolve().parents[1]


def environment(home: Path) -> Path:
    """A new environment that can import the running one's packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin" / "python"


def milliseconds(python: Path, env: dict[str, str]) -> float:
    """Wall time of one start; -I leaves PYTHON* variables and the user's site directory out of it."""
    begin = time.perf_counter()
    process = os.posix_spawn(python, [python, "-I", "-c", "pass"], env)
    _, status = os.waitpid(process, 0)
    if status:
        raise SystemExit(f"{python} failed to start: wait status {status}")
    return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400, help="starts of each kind (default %(default)s)")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        without, with_it = environment(Path(folder, "without")), environment(Path(folder, "with"))
        pip = [sys.executable, "-m", "pip", "--python", with_it, "-qq"]
        subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", TREE], check=True)
        kinds = {
            "not installed": (without, {}),
            "FLASHPATCH unset": (with_it, {}),
            "FLASHPATCH=fp8": (with_it, {"FLASHPATCH": "fp8", "FLASHPATCH_LEDGER": folder}),
        }
        times = {name: [] for name in kinds}
        for turn in range(runs + 10):
            for name, (python, env) in kinds.items():
                taken = milliseconds(python, env)
                if turn >= 10:  # the first turns compile bytecode and fill the page cache
                    times[name].append(taken)
    base = median(times["not installed"])
    for name, values in times.items():
        print(f"{name:17} median {median(values):7.2f} ms   {median(values) - base:+7.2f} ms")
    cost = median(times["FLASHPATCH unset"]) - base
    print(f"cost when unset: {cost:.2f} ms, aim under {AIM_MS} ms: {'met' if cost < AIM_MS else 'missed'}")


if __name__ == "__main__":
    main()
