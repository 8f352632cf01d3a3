"""The one exception users see, and what it suggests for an unknown name."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class PatchError(RuntimeError):
    """A patch could not be armed, or refuses to go on.

    The message always names the patch, the target, the installed version and what to do about it; the same
    four pieces are kept as attributes for tools.

    Args:
        problem: what is wrong, in one sentence.
        patch: id of the patch or name of the family concerned.
        target: ``"package.module:Qual.name"`` of the patched object, if any.
        version: ``"distribution version"`` of the framework found, if any.
        advice: what the user can do."""

    def __init__(
        self,
        problem: str,
        *,
        patch: str | None = None,
        target: str | None = None,
        version: str | None = None,
        advice: str | None = None,
    ) -> None:
        self.problem = problem
        self.patch = patch
        self.target = target
        self.version = version
        self.advice = advice
        super().__init__(problem)  # with its attributes, all that pickling needs

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.patch, self.target, self.version) if part)
        text = f"[flashpatch{': ' + where if where else ''}] {self.problem}"
        if self.advice:
            text += f"{'' if self.problem.endswith(tuple('.!?:;,')) else '.'} {self.advice}"
        return text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def nearest(name: str, known: Iterable[str]) -> str:
    """``Did you mean 'fp8'? Known: bf16, fp8.``"""
    names = sorted(known)
    close = closest(name, names)
    hint = f"Did you mean {close!r}? " if close else ""
    return f"{hint}Known: {', '.join(names) or 'none'}."


def closest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the known name that is spelt most like ``name``; empty if none is."""
    import difflib

    return next(iter(difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=cutoff)), "")
