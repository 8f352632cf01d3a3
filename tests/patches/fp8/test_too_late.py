"""The look for engines that exist already."""

import sys
import types

import pytest

from flashpatch import registry


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
