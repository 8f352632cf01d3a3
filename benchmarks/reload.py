"""What one weight update costs on vLLM: FlashPatch, vLLM's own reload, and the least it could cost.

    python benchmarks/reload.py [--quick] [--repeats 5] [--json]

Needs vLLM on a CPU under Linux, and memory for three copies of the model. Random Qwen2 models are made in a
temporary directory. For each, in bf16 and in online fp8 (per channel), three processes take turns: an engine
with FlashPatch, an engine without, and the plain lower bound (each tensor copied once, each linear weight
quantized or packed once). All get the same tensors, which are in memory. Medians over the rounds are compared;
the first round is not counted. Memory is the highest resident size during the update above that before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from reloading import models

from flashpatch.report import Table, emit

HERE = Path(__file__).resolve().parent
PRECISIONS = {"bf16": "bf16", "fp8": "fp8_per_channel"}  # name here and in FLASHPATCH -> vLLM's quantization
WAYS = {"one call": "ours", "buckets": "ours", "native": "native", "bound": "bound"}  # way -> process
AIMS = {"time / native": 1.0, "memory / native": 1.0, "time / bound": 1.5}
ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the same threads on the same cores in all three processes
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}


class Worker:
    """One of the three processes."""

    def __init__(self, kind: str, size: models.Size, precision: str, folder: Path, limit: int) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")} | ENGINE
        env["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))
        if kind == "ours":
            env |= {"FLASHPATCH": precision, "FLASHPATCH_STRICT": "1", "FLASHPATCH_LEDGER": str(folder / "ledger")}
        self._log = (folder / f"{kind}-{precision}.log").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "reloading.worker", kind, size.name, PRECISIONS[precision], folder, str(limit)],
            cwd=HERE, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        self.threads = self._reply()["threads"]

    def __call__(self, way: str) -> dict:
        self._process.stdin.write(json.dumps({"way": way}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"{self._log.read()}\nthe process above ended with status {self._process.wait()}")
        return json.loads(line)


def tell(text: str) -> None:
    """Progress: rewritten in place on a terminal, line by line elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr, flush=True)


def case(size: models.Size, precision: str, folder: Path, repeats: int, limit: int) -> dict[str, list[dict]]:
    """Way -> one measurement per round, the first round left out."""
    title = f"{size.name} {precision}"
    workers: dict[str, Worker] = {}
    taken: dict[str, list[dict]] = {way: [] for way in WAYS}
    try:
        for kind in dict.fromkeys(WAYS.values()):
            tell(f"{title}: starting {kind}")
            workers[kind] = Worker(kind, size, precision, folder, limit)
        threads = {kind: worker.threads for kind, worker in workers.items()}
        if len(set(threads.values())) > 1:
            raise SystemExit(f"{title}: not the same number of threads: {threads}")
        first = _agreed(workers, title)
        for number in range(repeats + 1):
            turn = list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]
            for way in turn:
                result = workers[WAYS[way]](way)
                tell(f"{title}: round {number} of {repeats}, {way}: {result['ms']:.0f} ms, {result['mb']:.0f} MB")
                if number:
                    taken[way].append(result)
        _same_policy(workers, title, first)
    finally:
        for worker in workers.values():
            worker.close()
        tell("")
    return taken


def _agreed(workers: dict[str, Worker], title: str) -> list:
    ours, native = (workers[kind]("answer")["answer"] for kind in ("ours", "native"))
    if ours != native:
        raise SystemExit(f"{title}: the two engines answer differently: {ours} and {native}")
    return ours


def _same_policy(workers: dict[str, Worker], title: str, first: list) -> None:
    """Both engines must have been updated, and alike: what does nothing is quick."""
    for kind, way in (("ours", "buckets"), ("native", "native")):
        while not workers[kind](way)["policy"]:
            pass
    if _agreed(workers, title) == first:
        raise SystemExit(f"{title}: the answers are those from before the updates")


def compare(taken: dict[str, list[dict]]) -> dict[str, dict]:
    """Way -> its medians and, for ours, its ratios."""
    figures = {way: {key: median(r[key] for r in runs) for key in ("ms", "cpu_ms", "mb")}
               | {"least_ms": min(r["ms"] for r in runs), "most_ms": max(r["ms"] for r in runs)}
               for way, runs in taken.items()}  # fmt: skip
    native, bound = figures["native"], figures["bound"]
    for way in (way for way, kind in WAYS.items() if kind != "bound"):
        figures[way]["ratios"] = {
            "time / native": figures[way]["ms"] / native["ms"],
            "memory / native": figures[way]["mb"] / native["mb"],
            "time / bound": figures[way]["ms"] / bound["ms"],
        }
    return figures


def judged(name: str, ratio: float) -> str:
    """The verdict on one of our ratios, as precise as it is printed."""
    return "met" if round(ratio, 2) <= AIMS[name] else "missed"


def row(title: str, way: str, figures: dict, bucket: str) -> list[str]:
    kind = WAYS[way]
    label = {"one call": "FlashPatch, one call", "buckets": f"FlashPatch, {bucket} buckets",
             "native": "vLLM's own reload", "bound": "lower bound"}[way]  # fmt: skip
    cells = [title, label, f"{figures['ms']:.0f}", f"{figures['least_ms']:.0f}-{figures['most_ms']:.0f}",
             f"{figures['mb']:.0f}"]  # fmt: skip
    for name in AIMS:
        ratio = figures.get("ratios", {}).get(name)
        if ratio is None:
            cells.append("")
        else:
            cells.append(f"{ratio:.2f} {judged(name, ratio)}" if kind == "ours" else f"{ratio:.2f}")
    return cells


def available_gb() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only the smallest model")
    parser.add_argument("--sizes", nargs="+", choices=[s.name for s in models.SIZES], help="only these models")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds (default %(default)s)")
    parser.add_argument("--bucket-mib", type=int, default=16, help="bucket size (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every measurement as JSON")
    given = parser.parse_args()
    wanted = given.sizes or [size.name for size in (models.SIZES[:1] if given.quick else models.SIZES)]
    bucket = f"{given.bucket_mib} MiB"
    results, rows, notes, began = [], [], [], time.monotonic()
    for size in (size for size in models.SIZES if size.name in wanted):
        need = 5 + 5 * size.parameters * 2 / 2**30
        if available_gb() < need:
            notes.append(f"{size.name} left out: needs {need:.0f} GB of free memory, {available_gb():.0f} are")
            continue
        with tempfile.TemporaryDirectory(prefix="flashpatch-reload-") as temporary:
            tell(f"{size.name}: making {size.parameters / 1e6:.0f}M random parameters")
            folder = Path(temporary, "model")
            models.write(size, folder)
            for precision in PRECISIONS:
                taken = case(size, precision, folder, given.repeats, given.bucket_mib << 20)
                figures = compare(taken)
                results.append({"size": size.name, "parameters": size.parameters, "precision": precision,
                                "figures": figures, "runs": taken})  # fmt: skip
                rows += [row(f"{size.name} {precision}", way, figures[way], bucket) for way in WAYS]
    missed = [f"{r['size']} {r['precision']}, {way}: {name} {ratio:.2f}, aim {AIMS[name]:.1f}"
              for r in results for way, kind in WAYS.items() if kind == "ours"
              for name, ratio in r["figures"][way]["ratios"].items() if judged(name, ratio) == "missed"]  # fmt: skip
    aims = ", ".join(f"{name} <= {aim}" for name, aim in AIMS.items())
    table = Table(f"One weight update, medians of {given.repeats} rounds (aims: {aims})",
                  ["model", "way", "ms", "range", "MB extra", *AIMS], rows)  # fmt: skip
    emit({"aims": AIMS, "results": results, "missed": missed, "notes": notes}, [table], given.json)
    if not given.json:
        for line in [*notes, f"{len(missed)} aims missed" + (":" if missed else ""), *(f"  {m}" for m in missed)]:
            print(line)
    tell(f"{time.monotonic() - began:.0f} s in all\n" if sys.stderr.isatty() else "")


if __name__ == "__main__":
    main()
