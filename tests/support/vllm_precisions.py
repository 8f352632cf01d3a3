"""Open an engine in a precision by its name, update it, and compare it with stock vLLM.

The oracle of int8 is stock vLLM on a compressed-tensors checkpoint of the same weights, written by the
laboratory's own converter: the first load and every update must equal it to the last bit."""

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import vllm_updates as updates
from vllm_lab import engines, models, oracle

A, B = ("qwen2", 0), ("qwen2", 1)


@contextlib.contextmanager
def opened(name: str, model: str, *, options: Mapping[str, Any] | None = None, **kw: Any) -> Iterator[Any]:
    """Open an engine with a precision on; off again at the end, so that no option reaches the next engine."""
    import flashpatch

    flashpatch.enable(name, **options or {})
    try:
        with engines.open_llm(model, **kw) as llm:
            yield llm
    finally:
        flashpatch.disable(name)


def there_and_back(name: str, model: str, sources: list[str], seed: int, **kw: Any) -> dict[str, Any]:
    """Open `model` in the precision `name`, then send each source in bf16, in buckets that cut fused layers."""
    from flashpatch import ledger

    rng = random.Random(seed)
    with opened(name, model, **kw) as llm:
        inner = engines.inner_model(llm)
        before = engines.addresses(inner)
        found: dict[str, Any] = dict(answers=[engines.answers(llm)])
        for number, source in enumerate(sources):
            updates.sync(llm, updates.buckets(list(models.weights(source)), rng))
            if number % 2:
                updates.finish(llm)
            found["answers"].append(engines.answers(llm))
        found.update(
            moved=sorted(k for k, at in engines.addresses(inner).items() if before.get(k) != at),
            kernels=ledger.notes()["kernels"],
            precision=ledger.notes()["precision"],
        )
    return found


def check(found: dict[str, Any], want: list[dict[str, Any]]) -> None:
    gaps = [engines.difference(got, fresh) for got, fresh in zip(found["answers"], want, strict=True)]
    assert all(gap.exact for gap in gaps), gaps
    assert not found["moved"]


def int8(family: str, seed: int) -> dict[str, Any]:
    return oracle.answers(updates.checkpoint(family, seed, "int8"))


def refusal(name: str, model: str, **options: Any) -> str | None:
    def opens() -> None:
        with opened(name, model, options=options):
            pass

    return updates.error(opens)


def two_ranks(a: str, b: str) -> list[dict[str, Any]]:
    """Answers of two ranks before and after an update, which rounds whole tensors and takes each rank's part."""
    with engines.open_llm(a, tensor_parallel_size=2) as llm:
        before = engines.answers(llm)
        llm.collective_rpc(_send_on_rank, args=(b, 3))
        return [before, engines.answers(llm)]


def _send_on_rank(worker: Any, path: str, parts: int) -> None:
    items = list(models.weights(path))
    for part in range(parts):
        worker.get_model().load_weights(items[len(items) * part // parts : len(items) * (part + 1) // parts])
