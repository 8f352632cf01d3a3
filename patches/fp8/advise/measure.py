"""Time matrix products on one device, and keep the times.

The kernels are torch's: ``mm`` for bf16, ``_int_mm`` for int8, ``_scaled_mm`` for fp8 with a scale per row,
each of the 8-bit ones timed alone and with the rounding of activations and the scaling of results. An engine
may have better ones; a form whose kernel this torch does not have on this device is not guessed at.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.advise.shapes import PATCH
from flashpatch.patches.fp8.calibration import untrusted
from flashpatch.patches.fp8.precision import quantize

FORMAT = "flashpatch.products"
FORMS = ("bf16", "int8", "fp8")

_CACHE = 128 << 20  # bytes of weights in turn, so that they come from memory, as in a model
_COPIES = 16
_ROUNDS = (5, 40)
_SECONDS = 0.2  # spent on one product, once the fewest rounds are done
_LIMIT = 16 << 20


@dataclass(frozen=True)
class Time:
    """Hold the seconds of one product [m, k] by [k, n]: as a whole, and the kernel alone (the same in bf16)."""

    m: int
    k: int
    n: int
    form: str
    seconds: float
    kernel: float


@dataclass
class Measurement:
    """Hold what was measured on one device.

    Attributes:
        device: its name, such as ``NVIDIA H200`` or the processor's.
        where: versions and threads, for the reader.
        bandwidth: bytes per second of reading memory.
        times: the products.
        missing: form to why it has no kernel here.
    """

    device: str
    where: str
    bandwidth: float
    times: list[Time] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def find(self, m: int, k: int, n: int, form: str) -> Time | None:
        return next((t for t in self.times if (t.m, t.k, t.n, t.form) == (m, k, n, form)), None)


def name_of(device: torch.device) -> str:
    """Return the name of a device as its driver reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def this_device(wanted: str) -> torch.device:
    """Return the device called ``wanted`` (``cpu``, ``cuda``, ``cuda:1``, or empty for the best there is).

    Raises:
        PatchError: this machine has none of that name; nothing is said about devices that were not measured.
    """
    if not wanted:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = ["cpu"] + [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if wanted == "cuda" and len(here) > 1 or wanted in here:
        return torch.device(wanted)
    raise PatchError(
        f"this machine has no device {wanted[:60]!r}, so nothing was measured on it.",
        patch=PATCH,
        advice=f"Run 'flashpatch advise --save FILE' on such a machine and give --measured FILE here. "
        f"Here are: {', '.join(here)}.",
    )


def measure(
    products: Iterable[tuple[int, int, int, str]],
    device: torch.device,
    step: Callable[[], None] = lambda: None,
) -> Measurement:
    """Time products (m, k, n, form), all forms of one shape in the same rounds, so that they see the same
    machine."""
    found = Measurement(name_of(device), _where(device), _bandwidth(device))
    shapes: dict[tuple[int, int, int], list[str]] = {}
    for m, k, n, form in products:
        shapes.setdefault((m, k, n), []).append(form)
    for (m, k, n), forms in shapes.items():
        runs = {}
        for form in forms:
            try:
                runs[form] = _runs(m, k, n, form, device)
                for run in runs[form]:
                    run(0)
                _wait(device)
            except (RuntimeError, NotImplementedError, AttributeError) as error:
                runs.pop(form, None)
                if form == "bf16" or "out of memory" in str(error):
                    raise PatchError(
                        f"[{m}, {k}] by [{k}, {n}] cannot be timed in {form}: {str(error)[:120]}.",
                        patch=PATCH,
                        advice="Give smaller --batch sizes.",
                    ) from error
                found.missing.setdefault(form, str(error).strip().splitlines()[0][:160])
        for form, (whole, kernel) in _timed(runs, device).items():
            found.times.append(Time(m, k, n, form, whole, kernel))
        step()
    return found


def save(measurement: Measurement, path: Path) -> None:
    """Write a measurement as JSON. Raises PatchError: it cannot be written."""
    try:
        path.write_text(json.dumps({"format": FORMAT, **asdict(measurement)}, indent=1), encoding="utf-8")
    except OSError as error:
        raise untrusted.refuse(path, f"cannot be written ({error})") from error


def load(path: Path) -> Measurement:
    """Read a measurement. Raises PatchError: it is none, or its numbers are not positive and finite."""
    untrusted.size(path, _LIMIT)
    data = untrusted.json_object(path)
    if data.pop("format", None) != FORMAT:
        raise untrusted.refuse(path, "is no measurement", "Make one with 'flashpatch advise --save FILE'.")
    try:
        times = [Time(**entry) for entry in data.pop("times")]
        found = Measurement(times=times, **data)
        numbers = [found.bandwidth, *(x for t in times for x in (t.m, t.k, t.n, t.seconds, t.kernel))]
        well = all(isinstance(x, (int, float)) and math.isfinite(x) and x > 0 for x in numbers)
        well = well and all(t.form in FORMS and t.kernel <= t.seconds * 1.5 for t in times)
        texts = [found.device, found.where, *found.missing, *found.missing.values()]
        well = well and all(isinstance(text, str) for text in texts)
    except (TypeError, AttributeError, KeyError) as error:
        raise untrusted.refuse(path, f"is no measurement ({type(error).__name__})") from error
    if not well:
        raise untrusted.refuse(path, "is no measurement (its numbers are not positive and finite)")
    return found


def _runs(
    m: int, k: int, n: int, form: str, device: torch.device
) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return the whole product and its kernel alone, as functions of the round, which take the weights in turn."""
    generator = torch.Generator().manual_seed(0)
    size = k * n * (2 if form == "bf16" else 1)
    copies = max(1, min(_COPIES, math.ceil(_CACHE / size)))
    if form == "int8" and device.type == "cuda":
        m = max(m, 32)  # its kernel takes no fewer rows
    x = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    if form == "bf16":
        w = torch.randn(n, k, generator=generator).to(device, torch.bfloat16)
        weights = [w.clone() for _ in range(copies)]

        def plain(turn: int) -> torch.Tensor:
            return torch.mm(x, weights[turn % copies].t())

        return plain, plain
    q, scale = quantize.quantized(torch.randn(n, k, generator=generator).to(device), form)
    weights = [q.clone() for _ in range(copies)]
    xq, x_scale = quantize.dynamic(x, form)
    if form == "int8":
        return (
            lambda turn: quantize.w8a8(x, weights[turn % copies], scale),
            lambda turn: torch._int_mm(xq, weights[turn % copies].t()),
        )
    columns = scale.t().contiguous()

    def scaled(a: torch.Tensor, a_scale: torch.Tensor, turn: int) -> torch.Tensor:
        return torch._scaled_mm(a, weights[turn % copies].t(), a_scale, columns, out_dtype=torch.bfloat16)

    return lambda turn: scaled(*quantize.dynamic(x, "fp8"), turn), lambda turn: scaled(xq, x_scale, turn)


def _timed(runs: dict[str, tuple], device: torch.device) -> dict[str, tuple[float, float]]:
    """Return, per form, median seconds of the whole product and of the kernel, everything once a round."""
    seen: dict[tuple[str, int], list[float]] = {(form, part): [] for form in runs for part in (0, 1)}
    began = time.perf_counter()
    for turn in range(_ROUNDS[1]):
        if turn >= _ROUNDS[0] and time.perf_counter() - began > _SECONDS * len(runs):
            break
        for form, part in seen:
            _wait(device)
            start = time.perf_counter()
            runs[form][part](turn + 1)
            _wait(device)
            seen[form, part].append(time.perf_counter() - start)
    return {form: (median(seen[form, 0]), min(median(seen[form, 1]), median(seen[form, 0]))) for form in runs}


def _bandwidth(device: torch.device) -> float:
    source = torch.ones(_CACHE // 4, device=device)
    seconds = []
    for _ in range(5):
        _wait(device)
        start = time.perf_counter()
        source.sum()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return _CACHE / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _where(device: torch.device) -> str:
    how = f"CUDA {torch.version.cuda}" if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {how}"
