"""The parts of `cuda_lab.gpu`: what each runs on a GPU, or on the fake device in its place, and what its rows say."""

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from card import table
from tree import SUPPORT, TREE

from cuda_lab import cases, runs
from cuda_lab.compare import compare, differing

PRECISIONS = ("bf16", "fp8", "fp8_channel", "fp8_block", "block_cutlass", "int8", "static_kv")
ENGINES = (
    *("bf16:defaults:reload", "fp8:defaults:buckets"),
    *(f"{case}:graphs:buckets" for case in PRECISIONS),
    *("bf16:graphs:reload", "fp8:graphs:reload"),
    *("fp8:graphs:sleep1:wake:reload", "fp8:graphs:sleep2:wake-weights:buckets:wake-cache"),
)
VERL = {"bf16": {}, "fp8": {}, "default": {"FLASHPATCH": "fp8"}}  # the last opens without a scheme
WORKER = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # another process
ARMS = ("0", "1", "2", "3")
PATHS = os.pathsep.join(map(str, (SUPPORT, TREE / "benchmarks")))
CLOSE = 0.02  # of log-probabilities of engines whose weights are the same, byte for byte
ABOUT = "import torch; print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep='|')"


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: part and name.
        verdict: "equal", "close" (the same weights, other log-probabilities), "differs", "not here" (stock vLLM, or what is
            installed, cannot do it), "measured", or "not run" (the time was up).
        detail: in words."""

    case: str
    verdict: str
    detail: str


class Check:
    """Run parts in ``folder`` until ``deadline``, of `time.monotonic`.

    ``folder``: for checkpoints and results; ``fake``: ten times the compute capability of the fake device; 0: the GPU;
    ``deadline``: when the last process is killed."""

    def __init__(self, folder: Path, fake: int = 0, deadline: float = float("inf")) -> None:
        self.folder, self.fake, self.deadline = folder, fake, deadline
        about = subprocess.run(
            [sys.executable, "-c", ABOUT], env=runs.environment(fake), capture_output=True, text=True
        )
        if about.returncode:
            raise SystemExit(f"no GPU (FAKE=1 runs this on the fake device): {about.stderr.strip()[-300:]}")
        self.name, major, minor = about.stdout.strip().splitlines()[-1].split("|")
        self.capability = max(
            known for known in (80, 89, 90, 100, 120) if known <= 10 * int(major) + int(minor)
        )
        self.figures: dict[str, dict[str, dict[str, float]]] = {}  # by case, what was measured
        self.parts: dict[str, tuple[Callable[[list[str]], Iterator[Row]], Sequence[str]]] = {
            "engine": (self.engines, self.here(ENGINES)),
            "verl": (self.verl, tuple(VERL)),
            "drafter": (self.drafter, ARMS),
            "capture": (self.captured, ("graphs", "defaults")),
            "storage": (self.storage, cases.of(self.capability)),
            "job": (self.jobs, ("gsm8k_fp8", "flowrl_7b", "eagle_7b")),
            **{part: (functools.partial(self.measured, part), rows) for part, rows in table.ROWS.items()},
        }

    def here(self, scenarios: Sequence[str]) -> list[str]:
        """Return those whose case has a kernel on this device."""
        return [name for name in scenarios if self.capability in cases.CASES[name.partition(":")[0]].kernels]

    def rows(self, words: Sequence[str] = ()) -> Iterator[Row]:
        """Yield a row per case as it ends, and one for each that was not reached.

        ``words``: cases, or beginnings of several, as ``engine``, in the order in which they run; none: all.

        Raises:
            SystemExit: no case begins with one of them."""
        for part, cases_of in itertools.groupby(self.wanted(words), lambda case: case.partition(":")[0]):
            left = [case.partition(":")[2] for case in cases_of]
            if part in ("verl", "sglang") and find_spec(part) is None:
                yield from (Row(f"{part}:{name}", "not here", f"{part} is not installed") for name in left)
                continue
            for row in self.parts[part][0](list(left)):
                left.remove(row.case.partition(":")[2])
                yield row
            yield from (Row(f"{part}:{name}", "not run", "the time was up") for name in left)

    def wanted(self, words: Sequence[str]) -> list[str]:
        """Return the cases that words name, each once."""
        known = [f"{part}:{name}" for part, (_, names) in self.parts.items() for name in names]
        found = {
            word: [word] if word in known else [case for case in known if case.startswith(word)]
            for word in words or [""]
        }
        if unknown := [word for word, some in found.items() if not some]:
            raise SystemExit(f"no case begins with {', '.join(unknown)}; there are {', '.join(known)}")
        return list(dict.fromkeys(case for some in found.values() for case in some))

    def stream(self, what: str, mode: str, names: Sequence[str], **more: str) -> Iterator[tuple[str, Any]]:
        seconds = min(self.deadline - time.monotonic(), 3600.0)
        return runs.stream(self.folder, what, mode, self.fake, names, seconds, **more)

    def pairs(
        self, what: str, fresh: Sequence[str], names: Sequence[str], origin: Callable[[str], str], **more: str
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield each name with what its fresh engine and its updated one found."""
        wanted = dict(self.stream(what, "fresh", fresh))
        for name, got in self.stream(what, "update", names, **more):
            if origin(name) in wanted:
                yield name, wanted[origin(name)], got

    def engines(self, names: list[str]) -> Iterator[Row]:
        asleep = [[name] for name in names if "sleep" in name]  # one a process
        for group in ([name for name in names if "sleep" not in name], *asleep):
            fresh = list(dict.fromkeys(_opening(name) for name in group))
            for name, wanted, got in self.pairs("engine", fresh, group, _opening):
                yield _answers(f"engine:{name}", wanted, got)

    def verl(self, names: list[str]) -> Iterator[Row]:
        more = {**WORKER, **({"VERL_DISABLE_TRITON_FP8": "1"} if self.fake else {})}
        fresh = {name: f"{'fp8' if name == 'default' else name}_verl:graphs" for name in names}
        wanted = dict(self.stream("engine", "fresh", list(dict.fromkeys(fresh.values()))))
        for name in [name for name in names if fresh[name] in wanted]:
            scenario = f"{name}_verl:graphs:verl"
            for _, got in self.stream("engine", "update", [scenario], **more, **VERL[name]):
                yield _answers(f"verl:{name}", wanted[fresh[name]], got)

    def drafter(self, names: list[str]) -> Iterator[Row]:
        for arm, wanted, got in self.pairs("drafts", names, names, str):
            if row := _failed(f"drafter:{arm}", wanted, got):
                yield row
                continue
            away = distance(wanted["answers"], got["answers"])
            same = all(wanted[key] == got[key] for key in ("drafts", "accepted")) and not got["moved"]
            detail = (
                f"log-probabilities {away:.1e} from a fresh engine's; {got['accepted']} tokens of {got['drafts']} drafts right, "
                f"there {wanted['accepted']} of {wanted['drafts']}; {len(got['moved'])} tensors moved"
            )
            yield Row(f"drafter:{arm}", _verdict(away, 0.0, same), detail)

    def captured(self, names: list[str]) -> Iterator[Row]:
        for name, got in self.stream("captured", "update", names, FLASHPATCH="0"):
            if row := _failed(f"capture:{name}", {}, got):
                yield row
                continue
            whole = got["came"] == got["requests"] and got["states"] and not got["wrong"]
            detail = f"{got['came']} of {got['requests']} requests, {got['wrong']} of {got['states']} states name another token"
            yield Row(f"capture:{name}", "equal" if whole else "differs", detail)

    def storage(self, names: list[str]) -> Iterator[Row]:
        for name, wanted, got in self.pairs("storage", names, names, str):
            if row := _failed(f"storage:{name}", wanted, got):
                yield row
                continue
            found = compare(wanted, got)
            detail = f"{found.changed} tensors changed, {found.values} compared; {', '.join(sorted(found.kernels))}"
            verdict = "differs" if found.faults else "equal"
            yield Row(f"storage:{name}", verdict, str(found.faults or detail)[:300])

    def jobs(self, names: list[str]) -> Iterator[Row]:
        for name, got in self.stream("jobs", "update", names):
            if row := _failed(f"job:{name}", {}, got):
                yield row
                continue
            right = not got["wrong"] and min(got["changed"], default=0) > 10
            detail = (
                f"{len(got['changed']) + 1} syncs, {len(got['wrong'])} values or addresses differ {got['wrong'][:3] or ''}; "
                f"{got['live']} processes proven; rollouts' probabilities {max(got['away']):.1e} from the actor's at most; "
                f"{', '.join(f'{one:.1f}' for one in got['seconds'])} s a step"
            )
            yield Row(f"job:{name}", "equal" if right else "differs", detail)

    def measured(self, part: str, names: list[str]) -> Iterator[Row]:
        """What ends in an error, or not in time, leaves what its other processes found."""
        for name in names:
            case, said, verdict = f"{part}:{name}", [], "measured"
            for mode, more in table.processes(part, name):
                got = dict(self.stream("card", mode, [case], PYTHONPATH=PATHS, **more)).get(case)
                if got is None:
                    said.append("the time was up")
                elif "error" in got:
                    verdict = "differs"
                    said.append(got["error"][:400])
                else:
                    base = self.figures.get(f"{part}:{table.against(part, name)}", self.figures.get(case, {}))
                    said += [
                        f"{way} {_ratios(some, base.get(way, base.get('reload', {})))}"
                        for way, some in got.items()
                    ]
                    self.figures.setdefault(case, got)
            if set(said) != {"the time was up"}:
                yield Row(case, verdict, "; ".join(said))


def _ratios(figures: dict[str, float], base: dict[str, float]) -> str:
    """Return figures by unit in words, with the ratios to another row's that has the same."""
    return ", ".join(
        f"{value:{'.0f' if value >= 1000 else '.4g'}} {unit}"
        + (f" ({value / base[unit]:.2f})" if base.get(unit) else "")
        for unit, value in figures.items()
    )


def _opening(name: str) -> str:
    """Return a scenario's case with those steps alone that say how its engine opens."""
    case, *steps = name.split(":")
    return ":".join((case, *(step for step in steps if step in ("graphs", "defaults", "sleep1", "sleep2"))))


def _failed(case: str, fresh: Any, got: Any) -> Row | None:
    if "error" in fresh:
        return Row(case, "not here", fresh["error"][:200])
    return Row(case, "differs", got["error"][:400]) if "error" in got else None


def _answers(case: str, fresh: dict[str, Any], got: dict[str, Any]) -> Row:
    if row := _failed(case, fresh, got):
        return row
    away, noise = distance(fresh["answers"], got["answers"]), distance(fresh["answers"], fresh["again"])
    stored = differing(fresh["workers"], got["workers"])
    changed = got["before"] != got["answers"]
    detail = (
        f"log-probabilities {away:.1e} from a fresh engine's, which is {noise:.1e} from itself; {len(stored)} values differ "
        f"{stored[:3] or ''}, {len(got['moved'])} tensors moved, {got['graphs']} graphs ran"
    )
    return Row(case, _verdict(away, noise, changed and not stored and not got["moved"]), detail)


def _verdict(away: float, noise: float, same: bool) -> str:
    if not same or away > max(4 * noise, CLOSE):
        return "differs"
    return "equal" if away <= noise else "close"


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
