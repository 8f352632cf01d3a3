"""An update whose buckets are loaded on several streams of an accelerator, as vLLM's packed transfer does, keeps one order."""

import fp8_toys as toys
import pytest
from standin_streams import Accelerator

A, B = toys.checkpoint(0), toys.checkpoint(1)


@pytest.fixture
def accelerator(monkeypatch):
    return Accelerator(monkeypatch)


@pytest.fixture
def engine(accelerator, atomic):
    def process(module):
        if isinstance(module, toys.Linear):
            accelerator.note("processed")
        toys.process(module)

    engine = toys.engine(atomic=atomic, process=process)
    accelerator.log.clear()
    return engine


@pytest.mark.parametrize("named", [True, False])
def test_a_layer_cut_between_two_streams_is_processed_behind_both(accelerator, engine, named):
    """Its first part is on its way on the one while the second comes on the other."""
    first, second = (accelerator.Stream(name) for name in ("first", "second"))
    log, one = accelerator.log, "default" if named else "first"
    if named:
        engine.managed.begin()
    cut = next(at for at, (name, _) in enumerate(B) if name == "layers.0.k.weight")
    with accelerator.stream(first):
        engine.load(B[:cut])
    assert log == ["default waits for first"] * named + ["first waits for default"]
    log.clear()
    with accelerator.stream(second):
        engine.load(B[cut:])
    assert log == [f"{one} waits for second", *[f"processed on {one}"] * 4, f"second waits for {one}"]
    log.clear()
    engine.managed.finish()
    assert set(log) == (set() if named else {"first waits for default", "default waits for first"})
    assert log[-1:] == ([] if named else ["default waits for first"])
    assert toys.same_answers(engine.model, toys.fresh("transposed", B))


def test_an_update_given_up_on_another_stream_is_waited_for(accelerator, engine):
    """Under atomic=layer it writes into layers that the next update writes as well."""
    with accelerator.stream(accelerator.Stream("first")):
        engine.load(B[:6])
    engine.managed.begin()
    assert accelerator.log[-1] == "default waits for first"
