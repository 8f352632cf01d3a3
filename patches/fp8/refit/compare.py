"""Find what the post-processing of a layer has made or changed, by its Python state before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashpatch.patches.fp8.refit.attributes import ABSENT, table, tables
from flashpatch.patches.fp8.refit.fold import Plan
from flashpatch.patches.fp8.refit.layer_state import TABLES, Snapshot


def compare(
    name: str,
    modules: list[torch.nn.Module],
    live: Snapshot,
    before: Snapshot,
    after: Snapshot,
    initial: Mapping[int, int],
    plan: Plan,
) -> None:
    """Plan to bring into a live layer what post-processing has made of fresh values.

    Args:
        name: of the layer, for errors.
        modules: of the layer; they are in their live state again.
        live: their state in the running engine.
        before: their state with fresh values, before post-processing.
        after: the same after post-processing.
        initial: identity of buffers that were shown at their initial values -> writes to them before.
        plan: without steps yet.

    Raises:
        LayoutChanged: the values do not fit the storage in use.
    """

    def unwritten(value: Any) -> bool:
        """Whether a value is such a buffer, and the post-processing did not write to it."""
        return id(value) in initial and initial[id(value)] == value._version

    def pair_into(container: Any, key_table: str, old: dict, fresh: dict, running: dict) -> None:
        """Plan a container's attributes, or one of its tables: what has changed, and what is gone."""
        state = getattr(container, key_table) if key_table else table(container)
        last = plan.known.keys(container, key_table)
        if key_table:
            changed = {k: v for k, v in fresh.items() if v is not running.get(k) and not unwritten(v)}
        else:
            changed = {k: v for k, v in fresh.items() if k in last or v is not old.get(k, ABSENT)}
        where = name if container in modules else f"{name}:{type(container).__name__}"
        for key, value in changed.items():
            if running.get(key) is not None:
                value = plan.pair(running[key], value, f"{where}.{key}")
            elif value is None:
                continue
            else:
                plan.come_or_go(value, f"{where}.{key}")
            plan.assign(state, key, value)
        plan.derived.note(container, [k for k, v in fresh.items() if v is not old.get(k, ABSENT)], key_table)
        for key in running.keys() & (old.keys() | last) - fresh.keys() - TABLES:
            plan.drop(state, key, f"{where}.{key}")
        for key, value in fresh.items():
            if value is None and isinstance(running.get(key), float):
                plan.assign(state, key, None)  # a forward derived it from what is old now, and does so again

    for identity, (container, fresh) in after.contents.items():
        if identity not in before.contents or identity not in live.contents:
            continue  # made by the post-processing: reached through the attribute that holds it
        old, running = before.contents[identity][1], live.contents[identity][1]
        if not (fresh or running):
            continue  # most are empty tables of hooks
        if isinstance(fresh, dict):
            for one, now, was in tables(container, fresh, old):
                used = running[one] if one else running
                if now or used:
                    pair_into(container, one, was, now, used)
        elif any(a is not b for a, b in zip(old, fresh)) or len(old) != len(fresh):
            plan.contents(container, running, fresh, name)


def module_tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    """Return the parameters and tensor attributes of a snapshot's modules."""
    found = []
    for container, contents in snapshot.contents.values():
        if isinstance(container, torch.nn.Module):
            found += [t for t in contents["_parameters"].values() if t is not None]
            found += [v for v in contents.values() if isinstance(v, torch.Tensor)]
    return found
