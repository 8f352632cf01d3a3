"""Take a family through enable and disable, and find what its patches left behind: ``python undo_lab.py FAMILY``.

Before and after, every target of every patch is looked at, with the containers of its module and of its class: a registry
that has one entry more is found too. Prints JSON: states by patch, and a list of problems."""

import json
import sys
from collections.abc import Iterable
from importlib import import_module
from typing import Any

Trace = dict[str, Any]


def owner_of(target: str) -> tuple[Any, str] | None:
    """Return the object that holds a target, and the target's name in it; None if it is not in this environment."""
    module, _, path = target.partition(":")
    *parts, name = path.split(".")
    try:
        owner: Any = import_module(module)
        for part in parts:
            owner = getattr(owner, part)
    except (ImportError, AttributeError, AssertionError, RuntimeError):
        return None
    return (owner, name) if name in vars(owner) else None


def trace(targets: Iterable[str]) -> Trace:
    """Return what is seen of the targets that exist here: each object, and the content of containers beside it."""
    found: Trace = {}
    for target in targets:
        place = owner_of(target)
        if place is None:
            continue
        owner, name = place
        found[target] = vars(owner)[name]
        module = sys.modules[target.partition(":")[0]]
        for holder in {id(one): one for one in (owner, module)}.values():
            for key, value in list(vars(holder).items()):
                if isinstance(value, dict | list | set) and not key.startswith("__"):
                    found[f"{target} beside {key}"] = _content(value)
    return found


def _content(value: dict | list | set) -> Any:
    if isinstance(value, dict):
        return [(id(key), id(one)) for key, one in value.items()]
    return sorted(map(id, value)) if isinstance(value, set) else [id(one) for one in value]


def differences(before: Trace, after: Trace) -> list[str]:
    """Return what is another object, or has another content, than it was; what is new counts as well."""
    names = sorted(before.keys() | after.keys())
    gone = object()
    return [name for name in names if not _same(before.get(name, gone), after.get(name, gone))]


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is list and one == other)


def check(family: str) -> dict[str, Any]:
    """Enable and disable a family here; return the state of each patch between, and what is wrong."""
    import flashpatch
    from flashpatch import registry

    patches = registry.family(family).patches
    targets = [target for patch in patches for target in patch.targets]
    trace(targets)  # imports fill registries
    before = trace(targets)
    flashpatch.enable(family)
    during = trace(targets)
    states = {patch.id: flashpatch.status()[patch.id].state.word for patch in patches}
    chosen = {patch.id: flashpatch.status()[patch.id].target for patch in patches}
    flashpatch.disable(family)
    problems = [f"left behind: {name}" for name in differences(before, trace(targets))]
    for patch in patches:
        if states[patch.id] == "installed" and patch.wrapper is not None:
            target = chosen[patch.id]
            if _same(before.get(target), during.get(target)):
                problems.append(f"{patch.id} is installed and {target} is the original")
    return {"states": states, "problems": problems}


if __name__ == "__main__":
    import flashpatch

    if len(sys.argv) > 2:
        flashpatch.enable(*sys.argv[2:])
    print(json.dumps(check(sys.argv[1])))
