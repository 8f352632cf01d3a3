"""Define an arm: one speculative configuration, or none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from flashpatch.errors import PatchError
from flashpatch.patches.eagle.errors import eagle_error

OFF = "disable"


@dataclass(frozen=True, order=True)
class Arm:
    """Hold one speculative configuration.

    Attributes:
        steps: draft steps; a request gains between 1 and ``steps + 1`` tokens.
        topk: branches kept per step; 1 drafts a chain.
        draft_tokens: tokens per request that the target verifies, the last accepted one included."""

    steps: int
    topk: int
    draft_tokens: int

    DISABLE: ClassVar[Arm]

    def __str__(self) -> str:
        return f"{self.steps}_{self.topk}_{self.draft_tokens}" if self.steps else OFF

    @classmethod
    def parse(cls, text: str | Arm) -> Arm:
        """Read ``"{steps}_{topk}_{draft_tokens}"`` or ``"disable"``. Raises PatchError if the text is not an arm, or
        one that no engine can draft."""
        if isinstance(text, Arm):
            return text
        if text == OFF:
            return cls.DISABLE
        parts = text.split("_") if isinstance(text, str) else []
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 7 for part in parts):
            _refuse(
                text, "is not steps_topk_tokens", "Write it as 3_1_4 (3 steps, top-1, 4 tokens) or disable."
            )
        steps, topk, draft_tokens = map(int, parts)
        most = 1 + topk + (steps - 1) * topk * topk
        if steps < 1 or topk < 1 or not (most if topk == 1 else 2) <= draft_tokens <= most:
            _refuse(
                text,
                "cannot be drafted and verified",
                f"Steps and top-k start at 1; a chain of n steps verifies n + 1 tokens, a tree 2 to {most}.",
            )
        return cls(steps, topk, draft_tokens)


Arm.DISABLE = Arm(0, 0, 0)


def parse_arms(arms: Iterable[str | Arm]) -> tuple[Arm, ...]:
    """Read a list of arms, in its order. Raises PatchError if the list names an arm twice, or has an entry
    that is not an arm."""
    found = tuple(Arm.parse(arm) for arm in arms)
    twice = sorted({str(arm) for arm in found if found.count(arm) > 1})
    if twice:
        raise eagle_error("arms", f"arms are given twice: {', '.join(twice)}.", "Name each arm once.")
    return found


def check_room(arms: Iterable[Arm], own: Arm, patch: str) -> None:
    """Refuse, in the name of a patch, arms larger than ``own``, the configuration that the engine was opened with."""
    for arm in arms:
        if arm.steps > own.steps or arm.topk > own.topk or arm.draft_tokens > own.draft_tokens:
            raise PatchError(
                f"arm {arm} is larger than the engine's own configuration {own}",
                patch=patch,
                target="arms",
                advice="Open the engine with its largest configuration, or leave this arm out.",
            )


def _refuse(text: object, problem: str, advice: str) -> None:
    raise eagle_error("arms", f"arm {text!r} {problem}.", advice)
