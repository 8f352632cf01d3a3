"""List the rules that choose among arms, by the names a user types."""

from __future__ import annotations

from flashpatch.patches.eagle.bandit.rules.base import Rule
from flashpatch.patches.eagle.bandit.rules.thompson import Thompson
from flashpatch.patches.eagle.bandit.rules.windowed import Greedy, Ucb1

RULES: dict[str, type[Rule]] = {"eg": Greedy, "ucb1": Ucb1, "thompson": Thompson}
DEFAULT = "thompson"
