"""Every way a framework may define the place a patch wants."""

import pytest

ENGINE = """
    import abc
    import toy.tools as tools
    from outside import Foreign
    from toy.base import Base, helper as renamed
    from .base import *
    from . import base

    FLAG = limit = 3

    def plain(a, b=1, *rest, c, **more): ...

    async def coroutine(request): ...

    if FLAG:
        def conditional(a, b): ...
    else:
        def conditional(a): ...

    try:
        from toy.missing import optional
    except ImportError:
        optional = None

    class Engine(base.Base, abc.ABC):
        size: int = 0
        kind = "toy"

        class Inner:
            def deep(self): ...

        def __init__(self, model):
            self.runner: object = model
            self.left = self.right = None

        @property
        def weights(self): ...

        @weights.setter
        def weights(self, value): ...

        @classmethod
        def build(cls, config): ...

        def step_slow(self, n): ...
        step = step_slow

    class Foreigner(Foreign): ...
"""
BASE = """
    class Root:
        def from_root(self, depth): ...

    class Base(Root):
        def inherited(self, x): ...

    def helper(y): ...

    def starred(z): ...
"""


@pytest.fixture(autouse=True)
def toy(write):
    write(toy={"engine": ENGINE, "base": BASE, "tools": "def tool(t): ..."})


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("plain", ("a", "b", "rest", "c", "more")),
        ("coroutine", ("request",)),
        ("Engine.Inner.deep", ("self",)),
        ("Engine.build", ("cls", "config")),
        ("Engine.step", ("self", "n")),
        ("Engine.weights", ("self",)),
        ("Engine.inherited", ("x",)),
        ("Engine.from_root", ("depth",)),
        ("Engine", ("model",)),
        ("starred", ("z",)),
        ("tools.tool", ("t",)),
        ("base.Root.from_root", ("depth",)),
    ],
)
def test_callables_are_found_with_their_parameters(checked, name, params):
    result = checked(f"toy.engine:{name}", params=params)
    assert result.ok, result.drift
    drifted = checked(f"toy.engine:{name}", params=("absent",))
    assert not drifted.ok
    assert "'absent'" in drifted.drift and drifted.line in drifted.drift


@pytest.mark.parametrize(
    "name", "FLAG limit optional Engine.size Engine.kind Engine.runner Engine.left Engine.right".split()
)
def test_attributes_and_constants_exist(checked, name):
    assert checked("toy.engine:plain", exists=(f"toy.engine:{name}",)).ok


def test_all_conditional_definitions_must_hold_and_a_property_is_its_getter(checked):
    assert checked("toy.engine:conditional", params=("a",)).ok
    result = checked("toy.engine:conditional", params=("b",))
    assert not result.ok
    assert result.line == "toy/engine.py:17"
    assert not checked("toy.engine:Engine.weights", params=("value",)).ok


def test_a_reexported_name_leads_to_its_module_and_the_first_target_that_exists_wins(checked):
    assert checked("toy.engine:renamed").target == "toy.base:helper"
    assert checked("toy.engine:Base.inherited").target == "toy.base:Base.inherited"
    result = checked("toy.engine:Engine.inherited")
    assert (result.target, result.line) == ("toy.engine:Engine.inherited", "toy/base.py:5")
    result = checked("toy.newer:plain", "toy.engine:absent", "toy.engine:plain", "toy.base:helper")
    assert (result.ok, result.target) == (True, "toy.engine:plain")


def test_no_target_says_what_each_lacks(checked):
    result = checked("toy.newer:plain", "toy.engine:Engine.absent")
    assert (result.ok, result.target) == (False, "")
    assert result.drift == (
        "toy.newer:plain is gone: no module toy.newer (toy/newer.py); "
        "toy.engine:Engine.absent is gone: no 'absent' in Engine (toy/engine.py:24)"
    )


def test_what_leads_out_of_the_sources_exists_but_cannot_be_vouched_for(checked):
    assert checked("toy.engine:Foreign").ok
    result = checked("toy.engine:Foreign", params=("a",))
    assert "no longer a function or class in this source (toy/engine.py:3)" in result.drift
    assert not checked("toy.engine:Foreigner.method").ok


def test_type_checking_blocks_define_nothing(write, checked):
    write(
        toy={
            "typed": """
                from typing import TYPE_CHECKING
                if TYPE_CHECKING:
                    def seen(a): ...
                    def only_typed(a): ...
                else:
                    def seen(b): ...
            """
        }
    )
    assert checked("toy.typed:seen", params=("b",)).ok
    assert not checked("toy.typed:only_typed").ok


def test_import_cycles_and_self_reference_end(write, checked):
    write(
        toy={
            "one": "from toy.two import name, other\nname = name\nclass A(A): ...\n",
            "two": "from toy.one import *\nfrom toy.one import name",
        }
    )
    assert checked("toy.one:A").ok
    assert not checked("toy.one:A.method").ok
    checked("toy.one:name", "toy.one:nothing", "toy.two:nothing")


def test_a_class_without_init_takes_its_fields(write, checked):
    write(toy={"config": "class Parent:\n    a: int\n\nclass Config(Parent):\n    b: int = 0\n    c = 1\n"})
    assert checked("toy.config:Config", params=("a", "b")).ok
    assert not checked("toy.config:Config", params=("c",)).ok


def test_a_file_that_is_not_python_is_drift(write, checked):
    write(toy={"broken": "x = 1\ndef f(:\n"})
    result = checked("toy.broken:f")
    assert not result.ok
    assert result.line == "toy/broken.py:2"
    assert "cannot be read as Python" in result.drift
