"""Say from measured times whether 8-bit rollout is expected to be faster, and if not, why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flashpatch.errors import PatchError
from flashpatch.patches.fp8.advise.measure import Measurement, Time
from flashpatch.patches.fp8.advise.shapes import PATCH, Products

_FASTER, _SLOWER = 1.1, 0.95
_BOUND = 1.5  # a product is bound by memory if it takes no longer than so many times reading its weights


@dataclass(frozen=True)
class Verdict:
    """Hold what is expected of one form at one batch size.

    Attributes:
        form: ``int8`` or ``fp8``.
        batch: sequences decoded at once.
        bf16, eight: seconds of all products of a decoding step; ``eight`` has lm_head in bf16 as well, and
            rounds activations with plain torch.
        speedup: their ratio. The whole step gains less: attention, norms, sampling and scheduling take the
            same time in both.
        best: the ratio if rounding activations cost nothing, which an engine's fused kernels come near to.
        word: ``faster`` if it is even with plain rounding, ``slower`` if it is even with rounding for free,
            ``open`` if the engine's kernels decide, else ``same``.
        why: reasons, one sentence each.
    """

    form: str
    batch: int
    bf16: float
    eight: float
    speedup: float
    best: float
    word: str
    why: tuple[str, ...]


def needed(
    products: Products, batches: Sequence[int], forms: Sequence[str]
) -> Iterator[tuple[int, int, int, str]]:
    """Return the products (m, k, n, form) whose times a verdict needs."""
    for batch in batches:
        for k, n in products.layers:
            yield batch, k, n, "bf16"
            yield from ((batch, k, n, form) for form in forms)
        if products.head is not None:
            yield batch, *products.head, "bf16"


def judge(products: Products, measured: Measurement, batch: int, form: str) -> Verdict:
    """Return the verdict on one form at one batch size.

    Raises:
        PatchError: a product that it needs was not measured on that device.
    """
    head = 0.0 if products.head is None else _time(measured, batch, *products.head, "bf16").seconds
    plain = {shape: _time(measured, batch, *shape, "bf16") for shape in products.layers}
    eight = {shape: _time(measured, batch, *shape, form) for shape in products.layers}
    counts = products.layers
    layers = sum(plain[s].seconds * count for s, count in counts.items())
    small = sum(eight[s].seconds * count for s, count in counts.items())
    kernel = sum(eight[s].kernel * count for s, count in counts.items())
    before, after = layers + head, small + head
    speedup, best = before / after, before / (kernel + head)
    word = (
        "faster"
        if speedup >= _FASTER
        else "slower"
        if best < _SLOWER
        else "open"
        if best >= _FASTER
        else "same"
    )
    why = tuple(_reasons(products, measured, plain, layers, small, kernel, head, word, batch))
    return Verdict(form, batch, before, after, speedup, best, word, why)


def _reasons(
    products: Products,
    measured: Measurement,
    plain: dict[tuple[int, int], Time],
    layers: float,
    small: float,
    kernel: float,
    head: float,
    word: str,
    batch: int,
) -> Iterator[str]:
    reading = sum(2 * k * n * count for (k, n), count in products.layers.items()) / measured.bandwidth
    rate = sum(2 * batch * k * n * count for (k, n), count in products.layers.items()) / layers
    best = max(2 * t.m * t.k * t.n / t.seconds for t in measured.times if t.form == "bf16")
    if layers <= _BOUND * reading:
        yield "bound by memory: 8 bits halve what is read"
    elif rate >= 0.5 * best:
        yield "bound by arithmetic: 8 bits help only as far as the kernel multiplies faster"
    else:
        yield (
            f"bound by neither memory ({layers / reading:.1f} times reading the weights) nor arithmetic "
            f"({100 * rate / best:.0f}% of the best rate seen): products this small cost "
            "mostly their launch"
        )
    if word != "faster":
        if kernel > 0.95 * layers:
            yield f"the 8-bit kernel alone takes {kernel / layers:.2f} of the bf16 time on this device"
        if small - kernel > 0.1 * small:
            share = 100 * (small - kernel) / small
            yield (
                f"rounding activations and scaling results takes {share:.0f}% of the time"
                + ("; it pays only if the engine fuses them into its kernels" if word == "open" else "")
            )
        if head > 0.2 * (layers + head):
            yield f"lm_head stays in bf16 and takes {100 * head / (layers + head):.0f}% of the bf16 time"


def _time(measured: Measurement, m: int, k: int, n: int, form: str) -> Time:
    found = measured.find(m, k, n, form)
    if found is None:
        why = f" ({measured.missing[form]})" if form in measured.missing else ""
        raise PatchError(
            f"[{m}, {k}] by [{k}, {n}] in {form} was not measured on {measured.device}{why}.",
            patch=PATCH,
            advice="Measure this model with these batch sizes on that device: 'flashpatch advise --save FILE'.",
        )
    return found
