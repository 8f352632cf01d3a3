"""Make patches of decorated functions, and collect them into a family.

::

    patches = Patches("whoami", "rich>=13", why="Lines of many processes look alike.", remove_when="rich can do it.")


    @patches.wrap("rich.console:Console.print", relies_on="self._buffer")
    def print(original, self, *objects, **keywords):
        \"""Print the process id in front of every message.\"""
        return original(self, f"{os.getpid()}:", *objects, **keywords)


    FAMILY = Family("whoami", "rich prints the process id", tuple(patches))"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from flashpatch.record import Contract, Evidence, Patch, Role

if TYPE_CHECKING:
    from flashpatch.arming.site import Site

F = TypeVar("F", bound=Callable[..., Any])
Names = str | tuple[str, ...]

_group_of: dict[Callable[..., Any], Patches] = {}


class Shared(TypedDict, total=False):
    """Fields of `Patch` that patches may share. Where several names may stand, one alone needs no tuple."""

    why: str
    upstream: str
    remove_when: str
    beside: str
    evidence: Evidence
    when: str
    scope: Role | tuple[Role, ...]
    one_of: Names
    needs: Names
    conflicts: Names
    tested: Names
    native: Callable[[Site], str | None]


class Own(Shared, total=False):
    """Keywords of one patch; what its `Patches` has too is taken from here.

    Attributes:
        id: the whole id, if its last part is not the function's name.
        requires: another requirement than that of its `Patches`.
        how: what it does, if that is not the first paragraph of the function's docstring.
        relies_on: what else must be there: definitions as ``"package.module:Qual.name"``, and names, without a
            colon, that the target's body must contain, such as ``"self.model_runner"``.
        since: definitions that older supported versions have not, see `Contract`.
        params: parameters that the target must have, if not those that the function names.
        undo: called with the site in place of its ``unwrap``, which it calls, to leave nothing else behind either."""

    id: str
    requires: str
    how: str
    relies_on: Names
    since: Mapping[str, tuple[str, ...]]
    params: Names
    undo: Callable[[Site], None]


class Patches:
    """Collect patches that share what is given here: those of one file, most often.

    Args:
        family: first part of their ids.
        requires: requirement on the framework, such as ``"verl>=0.9"``.
        framework: second part of their ids; the distribution that ``requires`` names, if empty.
        shared: see `Shared`."""

    def __init__(self, family: str, requires: str, *, framework: str = "", **shared: Unpack[Shared]) -> None:
        self._prefix = f"{family}.{framework or re.split('[^A-Za-z0-9_]', requires)[0]}"
        self._shared = {"requires": requires, **shared}
        self._patches: list[Patch] = []
        self._of: dict[Callable[..., Any], Patch] = {}

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._patches)

    def wrap(self, *targets: str, **own: Unpack[Own]) -> Callable[[F], F]:
        """Call the decorated function in place of a target, as ``function(original, *args, **kwargs)``.

        Its name is the last part of the patch's id, the first paragraph of its docstring says ``how``, and the
        parameters that it names, after ``original``, must be the target's. It stays a plain function.

        Args:
            targets: candidates, newest first, as ``"package.module:Qual.name"``; the first one found is used.
            own: see `Own`."""

        def collect(function: F) -> F:
            self._add(function, targets, {"params": _parameters(function)[1:], **own}, wrapper=function)
            return function

        return collect

    def register(self, *targets: str, **own: Unpack[Own]) -> Callable[[F], F]:
        """Call the decorated function once, as ``function(site)``: it puts something through a door of the framework
        and returns what takes it away again.

        Other than with `wrap` its parameters say nothing of the target's."""

        def collect(function: F) -> F:
            take_away: dict[Site, Callable[[], None]] = {}

            def apply(site: Site) -> None:
                take_away[site] = function(site)

            def undo(site: Site) -> None:
                take_away.pop(site)()

            apply.__module__ = function.__module__
            self._add(function, targets, own, apply=apply, undo=undo)
            return function

        return collect

    @staticmethod
    def of(function: Callable[..., Any]) -> Patch:
        """Return the patch that a decorated function is: if it has several decorators, that of the first one it met,
        which is the lowest."""
        return _group_of[function]._of[function]

    @staticmethod
    def at(function: Callable[..., Any]) -> dict[str, str]:
        """Return where an error of a decorated function comes from: ``PatchError(..., **patches.at(function))``."""
        patch = Patches.of(function)
        return {"patch": patch.id, "target": patch.targets[0]}

    def _add(
        self, function: Callable[..., Any], targets: tuple[str, ...], own: Mapping[str, Any], **applied: Any
    ) -> None:
        fields = {"id": f"{self._prefix}.{function.__name__}", **self._shared, **own, **applied}
        for name in {"scope", "one_of", "needs", "conflicts", "tested"} & fields.keys():
            fields[name] = _several(fields[name])
        relies_on = _several(fields.pop("relies_on", ()))
        fields["contract"] = Contract(
            params=_several(fields.pop("params", ())),
            exists=tuple(one for one in relies_on if ":" in one),
            since=fields.pop("since", {}),
            mentions=tuple(one for one in relies_on if ":" not in one),
        )
        fields["scope"] = frozenset(fields.get("scope", ()))
        fields["how"] = fields.get("how") or _how(function, fields["id"])
        patch = Patch(targets=targets, **fields)
        self._patches.append(patch)
        self._of.setdefault(function, patch)
        _group_of.setdefault(function, self)


def collected(*modules: ModuleType) -> tuple[Patch, ...]:
    """Return the patches of modules, in the order of the modules and, within one, of its `Patches` and its functions.

    A patch that is alone in its module needs no name for its `Patches`: ``@Patches("grpo", "verl>=0.9").wrap(...)``."""
    found: dict[Patches, None] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Patches):
                found[value] = None
            elif inspect.isfunction(value) and value in _group_of and value.__module__ == module.__name__:
                found[_group_of[value]] = None
    return tuple(patch for group in found for patch in group)


def _several(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    starred = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    given = inspect.signature(function).parameters.values()
    return tuple(one.name for one in given if one.kind not in starred)


def _how(function: Callable[..., Any], id: str) -> str:
    """Return the first paragraph of a function's docstring in one line, without marks of code."""
    if not function.__doc__ and sys.flags.optimize < 2:
        raise ValueError(
            f"{id}: give {function.__name__} a docstring; its first paragraph says what the patch does"
        )
    first = re.split(r"\n\s*\n", (function.__doc__ or "").strip())[0]
    return (
        " ".join(first.replace("`", "").split())
        or "(python -OO leaves no docstrings, from which this is read)"
    )
