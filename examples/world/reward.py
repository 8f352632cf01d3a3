"""The reward of the world: 1 for an answer that reasoning-gym's verification accepts in full, else 0."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

ANSWER = "Answer: "
"""Before the result of a worked answer."""
LONGEST = 512
"""Characters; no task has a longer answer."""

FORMS = {
    "countdown": re.compile(r"(?!.*(\*\*|//))[-+*/() \d]+"),
    "number_sorting": re.compile(r"\[[-'\"\d., ]*\]"),
}
"""What else an answer must look like, by generator: the verification evaluates the one as Python's expressions, powers
of powers included, and accepts a list of ``NaN`` for the other."""

SPECIAL = re.compile(r"<\|[a-z_]+\|>")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> float:
    """verl's custom reward function.

    ``extra_info["metadata"]`` is the JSON of what reasoning-gym knows of the question; without it, as in the tiny
    world and in that of worked answers, whose last line counts, the answer has to be ``ground_truth``. Partial credit, which many generators give, counts as 0.
    """
    answer = SPECIAL.sub("", solution_str).strip()
    if not answer or len(answer) > LONGEST:
        return 0.0
    known = (extra_info or {}).get("metadata")
    if not known:
        return float(answer.rpartition(ANSWER)[2] == ground_truth)
    metadata = json.loads(known)
    form = FORMS.get(metadata["source_dataset"])
    if form and not form.fullmatch(answer):
        return 0.0
    entry = {"question": "", "answer": ground_truth, "metadata": metadata}
    verify = _verification(metadata["source_dataset"])
    try:
        return float(verify(answer, entry) >= 1.0)
    except Exception:  # some generators' own parsing of a malformed answer fails
        return 0.0


@functools.cache
def _verification(generator: str) -> Any:
    """reasoning-gym's ``score_answer`` of a generator; its import takes some seconds."""
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(generator)
