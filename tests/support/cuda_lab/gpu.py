"""Check a GPU: what an update leaves in memory, what engines answer after it, compiled, with graphs, after sleep; and its cost.

    python -m cuda_lab.gpu [--cases WORD...] [--budget SECONDS] [--rows FILE] [--fake]

Needs the vLLM (0.24 or newer) and torch for CUDA of this interpreter, and no network: models are made on the spot. Each case's
row is printed, and appended to a file, as the case ends: who kills it keeps what it has found. Exit status 1 if anything differs."""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cuda_lab.check import Check


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "vllm", "verl", "transformers", "flashpatch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=[], help="beginnings of cases, as engine or engine:fp8")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing runs")
    parser.add_argument(
        "--rows", type=Path, default=Path("build/gpu/rows.jsonl"), help="where to append the rows"
    )
    parser.add_argument("--fake", action="store_true", help="on the fake device of this environment")
    options = parser.parse_args()
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    start, found = time.monotonic(), Counter()
    with tempfile.TemporaryDirectory(prefix="flashpatch-gpu-") as folder, options.rows.open("a") as rows:

        def write(what: dict) -> None:
            rows.write(json.dumps(what) + "\n")
            rows.flush()

        check = Check(Path(folder), 90 if options.fake else 0, start + options.budget)
        write({"device": check.name, "fake": options.fake, **versions()})
        print(f"{check.name}: {versions()}", flush=True)
        for row in check.rows(options.cases):
            seconds = round(time.monotonic() - start, 1)
            write({**asdict(row), "after": seconds})
            print(
                f"{seconds:7.1f}  {row.verdict:8}  {row.case:40} {' '.join(row.detail.split())}", flush=True
            )
            found[row.verdict] += 1
    print(", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    return int(bool(found["differs"]))


if __name__ == "__main__":
    sys.exit(main())
