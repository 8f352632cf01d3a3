"""List the rules that choose among arms, by the names a user types."""

from __future__ import annotations

from flashpatch.patches.eagle.bandit.rules.base import Rule
from flashpatch.patches.eagle.bandit.rules.thompson import Thompson
from flashpatch.patches.eagle.bandit.rules.windowed import Greedy, Ucb1
from flashpatch.patches.eagle.errors import eagle_error

RULES: dict[str, type[Rule]] = {"eg": Greedy, "ucb1": Ucb1, "thompson": Thompson}
DEFAULT = "thompson"


def rule_class(name: str) -> type[Rule]:
    """Return the class of a rule. Raises PatchError, which lists the rules, if there is no such one."""
    if name not in RULES:
        raise eagle_error(
            "rule", f"there is no bandit rule {name!r}.", f"Choose one of {', '.join(sorted(RULES))}."
        )
    return RULES[name]
