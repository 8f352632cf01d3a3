"""Skip tests of frameworks that are not installed here, give torch one thread, and spare the garbage collector."""

import gc
import os
from importlib.util import find_spec

import pytest
import warm
from cuda_lab import runs
from installed import version_of
from packaging.version import Version

pytest_plugins = ["cuda_lab.plugin", "marked_files"]

# Before torch is imported, and for all processes of the tests: what they compute is tiny, and on cores that several
# processes share, threads spend their time waiting for each other.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # and one server of `warm` serves those who say so and those who do not

FRAMEWORKS = ("vllm", "verl", "sglang")


# What is imported stays: a fifth of a large import's time is spent by the collector on going through it.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    warm.remember()
    if find_spec("hypothesis") is not None:
        from hypothesis import settings

        quick = "not full" in config.option.markexpr
        settings.register_profile("flashpatch", deadline=None, derandomize=quick)
        settings.load_profile("flashpatch")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda") and not runs.is_built():
            item.add_marker(pytest.mark.skip(reason="the fake CUDA device is not built here"))
        for framework in FRAMEWORKS:
            marker = item.get_closest_marker(framework)
            reason = marker and _missing(framework, marker.kwargs.get("least", ""))
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
        for marker in item.iter_markers("trainer"):
            if reason := _missing(marker.args[0], ""):
                item.add_marker(pytest.mark.skip(reason=reason))


def _missing(framework: str, least: str) -> str | None:
    """Why tests of ``framework``, from version ``least`` on, cannot run here; None where they can."""
    if find_spec(framework) is None:
        return f"{framework} is not installed"
    if least and version_of(framework) < Version(least):
        return f"{framework} is older than {least}"
    return None
