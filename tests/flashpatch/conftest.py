"""A throw-away framework and throw-away patch families, each scenario in a process of its own.

The framework is a package ``fakefw`` owned by a distribution ``fakefw-cpu``, so that versions resolve as they
do for vLLM; families join through the entry-point group, as an installed package's would. A process is forked from an
interpreter that has imported what FlashPatch takes from the standard library, and nothing of FlashPatch."""

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import machine
import pytest
import warm
from machine import limit

CORE = '''
import functools
def plain(x):
    """Adds one."""
    return x + 1
async def later(x):
    return x + 1
class Base:
    def handed_down(self, x):
        return x + 1
class Thing(Base):
    def __init__(self):
        self.stored = 1
    def method(self, x, *, by=1):
        return x + by
    @classmethod
    def build(cls, x):
        return (cls.__name__, x)
    @staticmethod
    def static(x):
        return x + 1
    @property
    def prop(self):
        return self.stored
    @prop.setter
    def prop(self, value):
        self.stored = value
    @functools.cached_property
    def cached(self):
        return self.stored + 10
class Child(Thing):
    pass
BORN = {"plain": plain, "later": later, **{f"Thing.{k}": v for k, v in vars(Thing).items()}}
'''

KIT = '''
"""What the scenarios' families are made of."""
from flashpatch import Contract, Family, Option, Patch
def patched(original, *args, **kwargs):
    return ("patched", original(*args, **kwargs))
async def patched_later(original, *args, **kwargs):
    return ("patched", await original(*args, **kwargs))
def patch(id, *targets, wrapper=patched, requires="fakefw>=1", **fields):
    return Patch(id, targets, requires, "why", "how", "remove when", wrapper=wrapper, **fields)
'''

TOYS = """
FAMILY = Family(
    "toy",
    "one patch",
    (patch("toy.fakefw.plain", "fakefw.core:plain", tested=("1.2.0",)),),
    names={"toy": {}, "toy8": {"bits": 8}},
    options={
        "bits": Option(16, "Width.", choices=(4, 8, 16), kind=int),
        "exclude": Option([], "Models left alone.", kind=list),
        "scale": Option(1.0, "Scale.", kind=float),
        "label": Option(None, "Label."),
    },
)
OTHER = Family(
    "other",
    "another patch",
    (patch("other.fakefw.method", "fakefw.core:Thing.method"),),
    options={"scale": Option(2.0, "Scale.", kind=float)},
)
"""


class World:
    """A directory on ``sys.path`` with the framework, families and whatever a scenario adds."""

    def __init__(self, root: Path) -> None:
        self.site = root / "site"
        self.ledger = root / "ledger"
        self.cwd = root / "cwd"
        self.cwd.mkdir()
        self.module("fakefw/__init__.py", "")
        self.module("fakefw/core.py", CORE)
        self.module("fakefw/user.py", "from fakefw.core import plain\n")
        self.module("toykit.py", KIT)
        self.framework_version("1.2.0")

    def module(self, path: str, source: str) -> Path:
        """Write a module."""
        file = self.site / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
        return file

    def framework_version(self, version: str) -> None:
        """Make the framework's distribution have this version."""
        self.distribution("fakefw-cpu", version, {"RECORD": "fakefw/__init__.py,,\n"})

    def distribution(self, name: str, version: str, files: Mapping[str, str]) -> None:
        """Write a distribution's metadata."""
        folder = self.site / f"{name.replace('-', '_')}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            (folder / file).write_text(text)

    def families(self, source: str = TOYS) -> None:
        """Let families join: ``FAMILY`` of ``source``, and ``OTHER`` if there; it has all names of the kit."""
        self.module("toys.py", f"from toykit import *\n{source}")
        chosen = [name for name in ("FAMILY", "OTHER") if f"{name} = " in source]
        lines = "".join(f"{name.lower()} = toys:{name}\n" for name in chosen)
        self.distribution("toys", "1.0", {"entry_points.txt": f"[flashpatch.patches]\n{lines}"})

    def family(self, *patches: str, name: str = "toy", **fields: str) -> None:
        """Let one family of these patches join; ``patches`` and ``fields`` are source text."""
        members = "".join(f"    patch({patch}),\n" for patch in patches)
        more = "".join(f", {field}={value}" for field, value in fields.items())
        self.families(f'FAMILY = Family("{name}", "", (\n{members}){more})\n')

    def under(self, **env: str) -> Callable[..., subprocess.CompletedProcess[str]]:
        """Return `run` with these variables."""
        return functools.partial(self.run, **env)

    def run(self, code: str, *, fails: bool = False, anew: bool = False, **env: str):
        """Run ``code`` in a process of its own, which must succeed unless it ``fails``; ``anew``: in a new interpreter."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHPATCH", "VLLM_"))}
        path = os.pathsep.join(filter(None, (str(self.site), kept.get("PYTHONPATH"))))
        own = {"FLASHPATCH_LEDGER": str(self.ledger), "FLASHPATCH_CACHE": str(self.cwd.parent / "cache")}
        env = {**kept, "PYTHONPATH": path, **own, **env}
        arguments = ["-c", textwrap.dedent(code)]
        if anew:
            done = machine.run([sys.executable, *arguments], 120, env=env, cwd=self.cwd)
        else:
            done = warm.run(warm.PLAIN, arguments, env=env, cwd=self.cwd, timeout=limit(120))
        assert (done.returncode != 0) == fails, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A world with the framework and no family."""
    return World(tmp_path)


@pytest.fixture
def toys(world: World) -> World:
    """A world with the families ``toy`` (also ``toy8``) and ``other``."""
    world.families()
    return world
