"""Replace one attribute by a wrapper, and restore it without a trace."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any, Literal

from flashpatch.arming import owners
from flashpatch.arming.call_counter import CallCounter
from flashpatch.arming.owners import is_a
from flashpatch.errors import PatchError
from flashpatch.record import Patch

Kind = Literal["function", "method", "classmethod", "staticmethod", "property", "class", "value"]
Wrapper = Callable[..., Any]

_ABSENT: Any = object()


class Owned(Exception):
    """Report that the attribute is owned by another tool, which the message names."""


class Site:
    """Wrap and unwrap the attribute that one patch replaces.

    Attributes:
        patch: the patch.
        target: ``"package.module:Qual.name"``, the target chosen for this installation.
        module: the imported module.
        options: the family's options, always the current ones.
        owner: the module or class that carries the attribute.
        name: the attribute's name.
        original: what was there: the raw entry of the owner's dictionary, or of the base class it is inherited from.
        kind: what ``original`` is.
        inherited: whether a base class, not ``owner``, defines it.

    Raises:
        LookupError: the target is not there."""

    def __init__(
        self,
        patch: Patch,
        target: str,
        module: ModuleType,
        options: Mapping[str, Any] = MappingProxyType({}),
        counter: CallCounter | None = None,
    ) -> None:
        self.patch = patch
        self.target = target
        self.module = module
        self.options = options
        self.counter = counter or CallCounter(patch.id)
        self.owner, self.name = _find_owner(module, target)
        self.original, self._home = _find(self.owner, self.name)
        if self.original is _ABSENT:
            raise LookupError(f"{target} does not exist")
        self.inherited = self._home is not self.owner
        self.kind = _kind(self.owner, self.original)
        self._installed: Any = _ABSENT

    @property
    def wrapped(self) -> bool:
        """Whether `wrap` put a replacement here that `unwrap` has not taken out."""
        return self._installed is not _ABSENT

    def wrap(self, wrapper: Wrapper) -> None:
        """Replace the attribute by a plain function that counts the call and calls ``wrapper``.

        ``wrapper(original, *args, **kwargs)`` gets the plain callable underneath: ``args[0]`` is ``self`` for
        a method and a property's getter, ``cls`` for a class method. An async original is replaced by an
        async function, which awaits what ``wrapper`` returns. A module-level function is replaced under
        every name bound to it in loaded modules.

        Raises:
            Owned: other code wrapped or replaced the attribute before.
            PatchError: the attribute is nothing that can be called."""
        if self.wrapped:
            if self.counter.open:
                raise self._error("is wrapped already.", "Call wrap() once per site.")
            self.counter.open = True
            return
        if self.kind in ("class", "value"):
            raise self._error(
                f"is a {self.kind} and cannot be wrapped.",
                "Target a function, a method or a property instead.",
            )
        if id(self.original) not in _sites:
            home = self._home if isinstance(self._home, type) else None
            by = owners.foreign(self.original, home.__module__ if home else self.module.__name__)
            if by is not None:
                raise Owned(by)
        self._install(wrapper)
        if self.kind == "function" and sys.getrefcount(self.original) > _references_of_ours():
            swap_bindings(self.original, self._installed)

    def _install(self, wrapper: Wrapper) -> None:
        replacement = _counted(owners.underlying(self.original), wrapper, self.counter)
        self._installed = _dress(replacement, self.original, self.owner, self.name)
        _sites[id(self._installed)] = self
        self.counter.open = True
        setattr(self.owner, self.name, self._installed)

    def unwrap(self) -> None:
        """Restore the original under every name bound to the replacement, if the replacement is outermost.

        If other code wrapped the replacement in turn it stays, passes every call through from now on, and
        `displaced_by` names them. Does nothing when nothing is wrapped."""
        if not self.wrapped:
            return
        self.counter.open = False
        installed, bottom = self._installed, self._bottom()
        if vars(self.owner).get(self.name) is installed:
            if bottom.inherited:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, bottom.original)
            self._forget(bottom)
        if self.kind == "function":
            swap_bindings(installed, bottom.original)

    def lingers(self) -> bool:
        """Whether a replacement that `unwrap` could not remove is still called by another tool's wrapper.

        `wrap` then lets that one act again instead of adding a second."""
        if not self.wrapped or self.counter.open:
            return False
        if _find(self.owner, self.name)[0] is not self._bottom().original:
            return True
        self._forget(self._bottom())
        return False

    def displaced_by(self) -> str | None:
        """Return who wrapped or removed the replacement; None while it is in effect or undone."""
        if not self.wrapped:
            return None
        if self._reloaded():
            return f"a reload of {self.module.__name__}" if self.counter.open else None
        current, _ = _find(self.owner, self.name)
        while current is not self._installed:
            above = _sites.get(id(current))
            if above is None:
                break
            current = above.original
        else:
            return None
        if current is self._bottom().original:
            return "nobody: the original was put back" if self.counter.open else None
        return owners.describe(current) if current is not _ABSENT else "nobody: the attribute was deleted"

    def _reloaded(self) -> bool:
        """Whether the module has been executed again since, and defines another function or class under this name."""
        module = sys.modules.get(self.module.__name__, self.module)
        try:
            owner, name = _find_owner(module, self.target)
        except LookupError:
            return False
        if owner is not self.owner:
            return True
        current, _ = _find(owner, name)
        if self.kind != "function" or not is_a(current, FunctionType) or current is self._bottom().original:
            return False
        return current.__globals__ is vars(module) and not hasattr(current, "__wrapped__")

    def _bottom(self) -> Site:
        """Return the bottom of the chain of undone wrappers beneath this one, or this one."""
        site = self
        while (below := _sites.get(id(site.original))) is not None and not below.counter.open:
            site = below
        return site

    def _forget(self, bottom: Site) -> None:
        """Drop this site and the undone ones beneath it, down to ``bottom``; none can be called any more."""
        site: Site | None = self
        while site is not None:
            below = _sites.get(id(site.original)) if site is not bottom else None
            _sites.pop(id(site._installed), None)
            site._installed = _ABSENT
            site = below

    def _error(self, problem: str, advice: str) -> PatchError:
        return PatchError(f"{self.target} {problem}", patch=self.patch.id, target=self.target, advice=advice)


_sites: dict[int, Site] = {}
"""Sites with a replacement in place, by ``id`` of the replacement, which the site keeps alive."""


@functools.cache
def _references_of_ours() -> int:
    """Baseline reference count of a function that `Site._install` has just replaced and no other module refers to.

    With no more than these, no other module can have a name for the function, and none is searched. Zero if
    references are not counted like that."""
    if sys.implementation.name != "cpython" or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return 0
    module = ModuleType("flashpatch_sample")
    exec("def sample(): pass", vars(module))
    sample = Patch("sample.flashpatch.sample", ("m.n:sample",), "", "", "", "", wrapper=print)
    site = Site(sample, "m.n:sample", module)
    site._install(print)
    count = sys.getrefcount(site.original)
    site._forget(site)
    return count


def _find_owner(module: ModuleType, target: str) -> tuple[Any, str]:
    *path, name = target.partition(":")[2].split(".")
    owner: Any = module
    for part in path:
        owner, _ = _find(owner, part)
        if not isinstance(owner, type):
            raise LookupError(f"{target} does not exist: {part} is no class")
    return owner, name


def _find(owner: Any, name: str) -> tuple[Any, Any]:
    """Return the raw attribute and the owner of its dictionary; ``_ABSENT`` when no such attribute exists."""
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in vars(holder):
            return vars(holder)[name], holder
    return _ABSENT, None


def _kind(owner: Any, raw: Any) -> Kind:
    if is_a(raw, classmethod):
        return "classmethod"
    if is_a(raw, staticmethod):
        return "staticmethod"
    if is_a(raw, property, functools.cached_property):
        return "property"
    if is_a(raw, type):
        return "class"
    if not callable(raw):
        return "value"
    return "method" if isinstance(owner, type) else "function"


def _counted(original: Callable[..., Any], wrapper: Wrapper, counter: CallCounter) -> Callable[..., Any]:
    """Make a plain function (picklable by reference, unlike a proxy) that replaces ``original``."""
    if inspect.iscoroutinefunction(original):

        @functools.wraps(original)
        async def replacement(*args: Any, **kwargs: Any) -> Any:
            if counter.open:
                counter.hit()
                return await wrapper(original, *args, **kwargs)
            return await original(*args, **kwargs)

    else:

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if counter.open:
                counter.hit()
                return wrapper(original, *args, **kwargs)
            return original(*args, **kwargs)

    replacement.__flashpatch__ = counter.patch_id  # type: ignore[attr-defined]
    return replacement


def _dress(replacement: Callable[..., Any], raw: Any, owner: Any, name: str) -> Any:
    if is_a(raw, classmethod, staticmethod):
        return type(raw)(replacement)
    if is_a(raw, property):
        return type(raw)(replacement, raw.fset, raw.fdel, raw.__doc__)
    if is_a(raw, functools.cached_property):
        cached = functools.cached_property(replacement)
        cached.__set_name__(owner, name)
        return cached
    return replacement


def swap_bindings(old: Any, new: Any) -> None:
    """Rebind every module-level name that *is* ``old`` to ``new``, in all loaded modules: what ``from x import f`` leaves.

    Only the dictionaries of modules are read, without running a lazy module's attribute access. Partials,
    registries and attributes of instances that hold ``old`` keep it."""
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            namespace = object.__getattribute__(module, "__dict__")
            if any(map(is_, list(namespace.values()), repeat(old))):
                for name, value in list(namespace.items()):
                    if value is old:
                        namespace[name] = new
