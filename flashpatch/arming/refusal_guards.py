"""Make targets of a refused group raise instead of running without the patch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from flashpatch.arming.group import Group
from flashpatch.arming.site import Owned, Site
from flashpatch.errors import PatchError
from flashpatch.log import log
from flashpatch.record import Patch


def install(group: Group, target: str, module: ModuleType) -> None:
    """Make ``target`` raise the group's refusal when called; the site is added to ``group.guards``.

    A target that is not there, or that other code owns, stays as it is, which is logged.
    """

    def refuse(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        group.check()
        return original(*args, **kwargs)

    if any(guard.target == target for guard in group.guards):
        return
    name = f"{group.family.name}.{group.framework}.refusal"
    patch = Patch(name, (target,), requires="", why="", how="", remove_when="", wrapper=refuse)
    try:
        site = Site(patch, target, module)
        site.wrap(refuse)
    except (LookupError, Owned, PatchError) as error:
        log.warning("%s: no guard on %s: %s", name, target, error)
    else:
        group.guards.append(site)


def remove(group: Group) -> None:
    """Take the guards out again."""
    for guard in group.guards:
        guard.unwrap()
    group.guards.clear()
