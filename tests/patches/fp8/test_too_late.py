"""The look for engines that exist already."""

import gc
import sys
import types

import pytest

from flashpatch import registry
from flashpatch.patches.fp8 import instances


@pytest.mark.parametrize(
    ("module", "name"),
    [("vllm.v1.engine.core", "EngineCore"), ("sglang.srt.managers.scheduler", "Scheduler")],
)
def test_it_leaves_lazy_proxies_asleep(monkeypatch, module, name):
    """isinstance() asks a proxy's ``__class__``, and openai's proxies then import 1500 modules."""

    class Engine:
        """Stands for the framework's class."""

    class Proxy:
        woken = 0

        @property
        def __class__(self):
            Proxy.woken += 1
            return Engine

    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: Engine}))
    proxy = Proxy()
    assert registry.families()["fp8"].too_late() is None
    assert Proxy.woken == 0, proxy


def test_objects_of_a_frozen_heap_are_found_and_stay_frozen():
    class Engine:
        pass

    before = gc.get_freeze_count()
    engine = Engine()
    gc.freeze()
    try:
        assert not [one for one in gc.get_objects() if type(one) is Engine]
        assert instances.of(Engine) == [engine]
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


OPEN = """
from vllm import LLM
llm = LLM(MODEL, enforce_eager=True, max_model_len=64, max_num_seqs=2, dtype="bfloat16", kv_cache_memory_bytes=1 << 24)
from flashpatch import registry
said = registry.families()["fp8"].too_late()
print("SAID", said)
"""


@pytest.mark.vllm
@pytest.mark.full
def test_an_engine_that_was_opened_before_is_named():
    """In a process of its own: vLLM freezes the heap with the engine in it."""
    import warm
    from machine import limit
    from vllm_lab import environment, models

    path = models.checkpoint(environment.store(), "qwen2")
    done = warm.run(
        warm.VLLM,
        ["-c", OPEN.replace("MODEL", repr(str(path)))],
        env=environment.clean(),
        cwd=environment.store(),
        timeout=limit(200),
    )
    assert "SAID 1 vLLM engine(s) exist already" in done.stdout, done.stdout + done.stderr[-3000:]
