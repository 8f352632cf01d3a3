"""State of a model's weights as a worker reports it to its scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Policy:
    """Which version of the policy a model holds.

    Attributes:
        role: of the model in its engine, ``target`` or ``drafter``.
        state: ``loading``, ``ready``, ``open`` or ``broken``, see `managed_model`.
        version: number of the last committed update, 0 before the first.
        missing: names that an open update still waits for, as `listed` gives them.
        error: why the weights are broken, or what came may be of several updates; empty otherwise.
        holds: of LoRA adapters, number to name and path; None if another number has taken its place in caches.
    """

    role: str
    state: str
    version: int
    missing: str = ""
    error: str = ""
    holds: dict[int | str, tuple[str, str] | None] = field(default_factory=dict)

    def why_refused(self) -> str:
        """Return one sentence, without its full stop, for a policy that may not generate: what failed first goes first."""
        said = [self.error.rstrip(".")] if self.error else []
        if self.missing:
            said.append(f"an update is incomplete, {self.missing} did not come")
        is_open = "an update is open, its sender has not ended it"
        return "; since then ".join(said) or (
            is_open if self.state == "open" else f"its state is {self.state!r}"
        )


def listed(names: list[str], separator: str = ", ", most: int = 6) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
