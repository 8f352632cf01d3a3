"""A decorated function stays what it is; its record is what decorator, name, signature and docstring say."""

import subprocess
import sys
from types import ModuleType

import pytest

from flashpatch.decorate import Patches, collected
from flashpatch.record import Contract, Family, Patch

patches = Patches(
    "toy", "engine_one>=2", scope=("driver", "worker"), why="It is slow.", remove_when="It is fast."
)


@patches.wrap("engine_one.new:Run.step", "engine_one.old:step", relies_on=("self.model", "engine_one.x:Y"))
def step(original, self, batch, *args, limit=None, **kwargs):
    """Skip ``what`` is
    known.

    More."""
    return original(self, batch, *args, limit=limit, **kwargs)


@patches.wrap("engine_one.b:two", id="toy.engine_one.two", evidence="update", scope=(), why="It is wrong.")
@patches.wrap("engine_one.a:one", params="x", relies_on="known", needs="toy.engine_one.step")
def one(original, *args):
    """Go on."""
    return original(*args)


registered: list[str] = []


@patches.register(
    "engine_one.a:table", since={"3": ("engine_one.a:more",)}, how="Adds an entry to the table."
)
def table(site):
    registered.append(site.target)
    return lambda: registered.remove(site.target)


@Patches("toy", "engine_two", framework="engine_two_1", why="-", remove_when="-").wrap("engine_two.a:alone")
def alone(original):
    """Stay alone."""


HERE = sys.modules[__name__]


def test_a_record_is_read_from_the_function() -> None:
    assert (
        collected(HERE)[0]
        == patches.of(step)
        == Patch(
            "toy.engine_one.step",
            ("engine_one.new:Run.step", "engine_one.old:step"),
            "engine_one>=2",
            why="It is slow.",
            how="Skip what is known.",
            remove_when="It is fast.",
            wrapper=step,
            contract=Contract(("self", "batch", "limit"), ("engine_one.x:Y",), mentions=("self.model",)),
            scope=frozenset({"driver", "worker"}),
        )
    )
    assert step(lambda *args, **kwargs: (args, kwargs), 1, 2) == ((1, 2), {"limit": None})


def test_patches_are_collected_in_the_order_of_their_file() -> None:
    names = "engine_one.step", "engine_one.one", "engine_one.two", "engine_one.table", "engine_two_1.alone"
    assert [patch.id for patch in collected(HERE)] == [f"toy.{name}" for name in names]
    elsewhere = ModuleType("elsewhere")
    vars(elsewhere)["alone"] = alone  # imported there
    assert collected(elsewhere) == ()


def test_one_function_may_be_several_patches_that_say_something_of_their_own() -> None:
    first, second = list(patches)[1:3]
    assert patches.of(one) is first and first.wrapper is second.wrapper is one
    assert (first.contract, first.needs) == (Contract(("x",), mentions=("known",)), ("toy.engine_one.step",))
    assert (second.contract, second.scope) == (Contract(), frozenset())
    assert (second.why, second.remove_when) == ("It is wrong.", "It is fast.")


def test_what_is_registered_is_taken_away() -> None:
    class Site:
        def __init__(self, target: str) -> None:
            self.target = target

    patch, first, second = patches.of(table), Site("a"), Site("b")
    assert patch.contract == Contract(since={"3": ("engine_one.a:more",)})
    patch.apply(first)
    patch.apply(second)
    assert registered == ["a", "b"]
    patch.undo(first)
    assert registered == ["b"]
    patch.undo(second)
    assert registered == []


def test_a_wrapper_may_have_an_undo_of_its_own() -> None:
    def undo(site): ...
    def wrapper(original):
        """Keep something."""

    Patches("toy", "engine_one", why="-", remove_when="-").wrap("a.b:c", undo=undo)(wrapper)
    assert patches.of(wrapper).undo is undo and patches.of(wrapper).wrapper is wrapper


def test_an_error_says_which_patch_it_is_of() -> None:
    assert patches.at(step) == {"patch": "toy.engine_one.step", "target": "engine_one.new:Run.step"}


def test_mistakes_are_told_where_they_are_made() -> None:
    def bare(original): ...
    def told(original):
        """Say it."""

    with pytest.raises(TypeError, match="sicne"):
        patches.wrap("a.b:c", sicne={})(told)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="why"):
        Patches("toy", "engine_one", remove_when="-").wrap("a.b:c")(told)
    with pytest.raises(ValueError, match="no process has the role trianer"):
        patches.wrap("a.b:c", scope="trianer")(told)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"toy.engine_one.bare: give bare a docstring"):
        patches.wrap("a.b:c")(bare)
    with pytest.raises(ValueError, match="two patches are called toy.engine_one.step"):
        Family("toy", "-", (*patches, patches.of(step)))


def test_without_docstrings_it_acts_as_before_and_says_why_it_does_not_say_how() -> None:
    code = "import sys, test_decorate as t; print([p.how for p in t.patches])"
    where = {"cwd": str(__file__).rpartition("/")[0], "capture_output": True, "text": True}
    said = subprocess.run([sys.executable, "-OO", "-c", code], **where)
    assert said.stdout.count("python -OO leaves no docstrings") == 3, said.stderr
    assert "Adds an entry to the table." in said.stdout
