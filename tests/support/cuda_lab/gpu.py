"""Check a GPU: what an update leaves in memory, what engines answer after it, with graphs and after sleep, and its cost.

    python -m cuda_lab.gpu [--json FILE] [--only WORD]

Needs the vLLM (0.24 or newer) and torch for CUDA of this interpreter, and no network: models are made on the spot. Prints
a table and writes it as JSON; exit status 1 if anything differs. With FAKE_CUDA_CAPABILITY set, the fake device of this
environment takes the GPU's place, for all but speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cuda_lab import cases, runs
from cuda_lab.compare import compare

ENGINES = ("bf16:graphs:reload", "fp8:graphs:buckets", "static_kv:graphs:reload", "int8:graphs:reload")
SLEEP = ("fp8:graphs:sleep1:wake:reload", "fp8:graphs:sleep2:wake-weights:buckets:wake-cache")
SECOND = "reload:reload"  # the first one compiles
LOSS_BOUND = 0.01  # of values that are rounded to bf16
ABOUT = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep='|')"


@dataclass(frozen=True)
class Row:
    """One line of the table; `verdict` is "equal", "differs", "not here" (stock vLLM cannot do it), or "measured"."""

    what: str
    case: str
    verdict: str
    detail: str


class Check:
    """Run the labs in ``folder`` on one device."""

    def __init__(self, folder: Path, fake: int = 0) -> None:
        self.folder, self.fake = folder, fake
        out = subprocess.run(
            [sys.executable, "-c", ABOUT],
            env=runs.environment(fake),
            capture_output=True,
            text=True,
            check=True,
        )
        self.name, major, minor = out.stdout.strip().split("|")
        self.capability = max(known for known in (80, 89, 90, 100) if known <= 10 * int(major) + int(minor))

    def run(self, what: str, mode: str, *names: str, **more: str) -> dict[str, dict[str, Any]]:
        return runs.run(self.folder, what, mode, self.fake, list(names), **more)

    def storage(self) -> Iterator[Row]:
        names = cases.of(self.capability)
        fresh, updated = self.run("storage", "fresh", *names), self.run("storage", "update", *names)
        for name in names:
            if "error" in fresh[name]:
                yield Row("storage", name, "not here", fresh[name]["error"][:120])
            elif "error" in updated[name]:
                yield Row("storage", name, "differs", updated[name]["error"][:200])
            else:
                found = compare(fresh[name], updated[name])
                detail = f"{found.changed} tensors changed, {found.values} compared; {', '.join(sorted(found.kernels))}"
                yield Row(
                    "storage", name, "differs" if found.faults else "equal", str(found.faults or detail)[:200]
                )

    def engines(self) -> Iterator[Row]:
        here = [name for name in ENGINES if self.capability in cases.CASES[name.partition(":")[0]].kernels]
        fresh = self.run("engine", "fresh", *{name.partition(":")[0]: None for name in here})
        updated = self.run("engine", "update", *here)
        for scenario in SLEEP:  # one a process
            if self.capability in cases.CASES["fp8"].kernels:
                updated |= self.run("engine", "update", scenario)
        for scenario, got in updated.items():
            yield _answers(scenario, fresh[scenario.partition(":")[0]], got)

    def losses(self) -> Iterator[Row]:
        for name, distance in self.run("losses", "").items():
            yield Row(
                "losses",
                name,
                _verdict(distance <= LOSS_BOUND),
                f"{distance:.1e} from float64, of the largest",
            )

    def cost(self) -> Iterator[Row]:
        case = "bf16" if self.fake else "large"
        scenario = f"{case}:{SECOND}"
        stock = self.run("engine", "update", scenario, FLASHPATCH="0")[scenario]
        ours = self.run("engine", "update", scenario)[scenario]
        if "error" in stock or "error" in ours:
            yield Row("cost", case, "not here", str(stock.get("error") or ours["error"])[:200])
            return
        (a, memory), (b, more) = stock["costs"]["reload"], ours["costs"]["reload"]
        mib = 1 << 20
        detail = f"{b:.3f} s, {b / a:.2f} of stock's reload; {more / mib:.0f} MiB beside the weights, stock {memory / mib:.0f}"
        yield Row("cost", case, "measured", detail)

    def rows(self, only: str = "") -> Iterator[Row]:
        """Yield what each part finds; ``only``: of the part of that name."""
        for part in (self.losses, self.storage, self.engines, self.cost):
            if only in ("", part.__name__):
                yield from part()


def _verdict(is_equal: bool) -> str:
    return "equal" if is_equal else "differs"


def _answers(scenario: str, fresh: dict[str, Any], got: dict[str, Any]) -> Row:
    if "error" in fresh:
        return Row("engine", scenario, "not here", fresh["error"][:120])
    if "error" in got:
        return Row("engine", scenario, "differs", got["error"][:200])
    away, noise = distance(fresh["answers"], got["answers"]), distance(fresh["answers"], fresh["again"])
    detail = f"logprobs {away:.1e} from a fresh engine's, which is {noise:.1e} from itself; {len(got['moved'])} tensors moved"
    return Row("engine", scenario, _verdict(away <= 4 * noise and not got["moved"]), detail)


def distance(a: list, b: list) -> float:
    """Return the largest difference of two sets of answers' log-probabilities, infinite if the tokens are others."""
    if [tokens for tokens, _ in a] != [tokens for tokens, _ in b]:
        return float("inf")
    return max(
        abs(x - y)
        for (_, left), (_, right) in zip(a, b, strict=True)
        for row, other in zip(left, right, strict=True)
        for x, y in zip(row, other, strict=True)
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "vllm", "flashpatch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="where to write the rows")
    parser.add_argument("--only", default="", help="one part: losses, storage, engines or cost")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flashpatch-gpu-") as folder:
        check = Check(Path(folder), int(os.environ.get("FAKE_CUDA_CAPABILITY", 0)))
        rows = list(check.rows(options.only))
    table = Table("what", "case", "verdict", "detail", title=f"{check.name}: {versions()}")
    for row in rows:
        table.add_row(row.what, row.case, row.verdict, row.detail)
    Console(width=180).print(table)
    report = {
        "device": check.name,
        "fake": bool(check.fake),
        **versions(),
        "rows": [asdict(row) for row in rows],
    }
    options.json.write_text(json.dumps(report, indent=1))
    return int(any(row.verdict == "differs" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
