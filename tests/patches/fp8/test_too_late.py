"""The look for engines that exist already."""

import gc
import sys
import types

import pytest

from flashpatch import registry
from flashpatch.patches._shared import instances


@pytest.mark.parametrize(("module", "name"), [*instances.VLLM.items(), *instances.SGLANG.items()])
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
    engine = Engine()
    engine.engine_core = engine.vllm_config = None
    assert all("exist already" in registry.families()[name].too_late() for name in ("fp8", "eagle")), engine


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
