"""A release of memory that fails leaves nothing that comes back later."""

import types

import fp8_toys as toys
import pytest

from flashpatch.patches.fp8.sglang import memory


@pytest.mark.parametrize("at", ["release", "copy"])
def test_a_release_that_fails_keeps_no_copies(at: str) -> None:
    """A drafter got back what it held before the failed release, in place of an update since."""
    engine = toys.engine("quantized", role="drafter")
    owners, kept = dict(target=[], draft=[engine.managed]), dict(target=False, draft=False)

    def fails() -> None:
        raise MemoryError("requests are running, or the host has no room")

    second = types.SimpleNamespace(tensors=fails)
    first = dict(owners, draft=[engine.managed, second]) if at == "copy" else owners
    with pytest.raises(MemoryError):
        memory.release(first, kept, fails)
    engine.update(toys.checkpoint(1))
    memory.release(owners, kept, lambda: [one.data.zero_() for one in engine.model.parameters()])
    memory.resume([engine.managed])
    assert toys.same_answers(engine.model, toys.fresh("quantized", toys.checkpoint(1)))
