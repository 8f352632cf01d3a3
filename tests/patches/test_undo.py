"""Every patch of every family is armed on the installed frameworks and leaves nothing behind; new records join by themselves."""

import json
from importlib.util import find_spec

import cpu_lab
import pytest
import warm
from tree import SUPPORT

from flashpatch import registry

MODULES = {"vllm": warm.VLLM, "verl": warm.VERL_VLLM, "sglang": warm.VERL_SGLANG}
WITHOUT = ("cpu",)
"""Switched on before other families of verl, whose engines else cannot be imported on a machine without an accelerator."""


def of(framework: str) -> list[str]:
    """Return the families that act on a framework alone, or on verl; `WITHOUT` acts on others under verl only."""
    found = {patch.family for patch in registry.patches().values() if patch.base_framework == framework}
    return sorted(found if framework == "verl" else found - set(WITHOUT))


def needed(id: str) -> list[str]:
    """Return the frameworks that a patch needs."""
    return [part for part in registry.patches()[id].framework.split("_") if part in MODULES]


def check(family: str, framework: str, folder) -> dict:
    first = WITHOUT if framework != "sglang" and find_spec("verl") and family != "cpu" else ()
    arguments = [str(SUPPORT / "undo_lab.py"), family, *first]
    done = warm.run(MODULES[framework], arguments, env=cpu_lab.environment(folder), cwd=folder, timeout=600)
    assert done.returncode == 0, cpu_lab.tail(done)
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    ("family", "framework"),
    [
        pytest.param(family, framework, marks=getattr(pytest.mark, framework))
        for framework in MODULES
        for family in of(framework)
    ],
)
def test_nothing_is_left_behind(family, framework, tmp_path):
    said = check(family, framework, tmp_path)
    assert not said["problems"]
    ours = {id: word for id, word in said["states"].items() if framework in needed(id)}
    words = {word for id, word in ours.items() if all(map(find_spec, needed(id)))}
    assert words <= {"installed", "superseded", "skipped"}
    assert "installed" in ours.values()
