"""The tasks of the world: which of reasoning-gym's, how hard, and how a small model is asked.

A task is one of reasoning-gym's generators with its settings. The model sees a short question and, before it,
a few questions with their answers in the form that the verification reads; a model of 135 million weights answers
few of reasoning-gym's own, longer instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SYSTEM = "Give only the answer."
EXAMPLES_SEED = 1_000_003

Entry = dict[str, Any]
"""What reasoning-gym calls an entry: question, answer and metadata."""


@dataclass(frozen=True)
class Task:
    """A generator of reasoning-gym with settings, and how it is asked.

    ``ask`` makes a question of an entry's metadata in place of reasoning-gym's own; ``reply`` writes an answer as the
    examples show it; ``examples`` is how many precede the question. No two of those agree in ``differ``, a key of the
    metadata, and none has an answer that its question contains.
    """

    settings: dict[str, Any]
    ask: Callable[[dict[str, Any]], str] | None = None
    reply: Callable[[str], str] = str
    examples: int = 2
    differ: str = "source_index"
    generator: str = ""

    def question(self, entry: Entry) -> str:
        return self.ask(entry["metadata"]) if self.ask else entry["question"].strip()


class Source:
    """Entries and prompts of one task. Needs reasoning-gym."""

    def __init__(self, name: str, seed: int) -> None:
        import reasoning_gym

        self.task = task = TASKS[name]
        self.name = name
        settings = {"size": 1_000_000, **task.settings}

        def created(seed: int) -> Any:
            return reasoning_gym.create_dataset(task.generator or name, seed=seed, **settings)

        self._entries = created(seed)
        self._shown = self._examples(created(EXAMPLES_SEED))

    def prompt(self, entry: Entry) -> list[dict[str, str]]:
        """The messages of a chat: the examples with their answers as turns of their own, then the entry's question."""
        turns = [("system", SYSTEM)]
        for question, reply in self._shown:
            turns += [("user", question), ("assistant", reply)]
        turns.append(("user", self.task.question(entry)))
        return [{"role": role, "content": content} for role, content in turns]

    def entries(self) -> Iterator[Entry]:
        """Entries whose questions differ from each other and from the examples', until a thousand in a row do not."""
        seen = {question for question, _ in self._shown}
        repeated = 0
        for at in range(len(self._entries)):
            entry = self._entries[at]
            question = self.task.question(entry)
            if question not in seen:
                repeated = 0
                seen.add(question)
                yield entry
            elif (repeated := repeated + 1) == 1000:
                return

    def _examples(self, entries: Any) -> list[tuple[str, str]]:
        shown, kinds, at = [], set(), 0
        while len(shown) < self.task.examples:
            entry = entries[at]
            at += 1
            kind = entry["metadata"][self.task.differ]
            question, reply = self.task.question(entry), self.task.reply(str(entry["answer"]))
            if kind not in kinds and reply not in question:
                kinds.add(kind)
                shown.append((question, reply))
        return shown


def _numbers(answer: str) -> str:
    """A list of numbers without the quotes that reasoning-gym has around each, and without ``.0``."""
    return answer.replace("'", "").replace(".0", "")


def _listed(things: list) -> str:
    return ", ".join(str(thing).removesuffix(".0") for thing in things)


def _terms(digits: int) -> dict[str, int]:
    return {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}


def _sorting(least: int, most: int) -> Task:
    return Task(
        {"min_numbers": least, "max_numbers": most, "max_decimals": 0, "min_value": 0, "max_value": 99},
        lambda m: f"Sort in {m['direction']} order: [{_listed(m['original_numbers'])}]",
        _numbers,
        differ="direction",
        generator="number_sorting",
    )


def _reversal(least: int, most: int) -> Task:
    return Task(
        {"min_words": least, "max_words": most},
        lambda m: f"Reverse this list: {_listed(m['words'])}",
        generator="word_sequence_reversal",
    )


TASKS = {
    "spell_backward": Task({"min_word_len": 3, "max_word_len": 4}, lambda m: f"Spell backward: {m['word']}"),
    "letter_counting": Task({"min_words": 1, "max_words": 3}),
    "letter_counting_5": Task({"min_words": 5, "max_words": 6}, generator="letter_counting"),
    "chain_sum": Task(_terms(1), lambda m: f"{m['expression']} ="),
    "chain_sum_2": Task(_terms(2), lambda m: f"{m['expression']} =", generator="chain_sum"),
    "basic_arithmetic": Task(
        {
            **_terms(1),
            "min_terms": 3,
            "max_terms": 3,
            "operators": ("+", "-"),
            "allow_parentheses": False,
            "allow_negation": False,
        }
    ),
    "products": Task(_terms(1), lambda m: f"{m['expression']} ="),
    "number_sorting": _sorting(3, 3),
    "number_sorting_5": _sorting(5, 6),
    "word_sorting": Task(
        {"min_words": 3, "max_words": 4, "max_word_length": 6},
        lambda m: f"Sort in {m['direction']} order: {_listed(m['original_words'])}",
        differ="direction",
    ),
    "word_sequence_reversal": _reversal(3, 3),
    "word_sequence_reversal_5": _reversal(5, 6),
    "number_filtering": Task(
        {"min_numbers": 3, "max_numbers": 5, "max_decimals": 0, "min_value": 0, "max_value": 99},
    ),
    "sentence_reordering": Task({"min_words_in_sentence": 3, "max_words_in_sentence": 4}),
    "base_conversion": Task(
        {"min_base": 2, "max_base": 3, "min_value": 1, "max_value": 15},
        lambda m: f"Write {m['source_repr']} of base {m['source_base']} in base {m['target_base']}.",
    ),
    "count_bits": Task({"min_n": 1, "max_n": 63}),
    "simple_equations": Task({"max_terms": 2, "max_value": 9}),
    "fraction_simplification": Task(
        {"max_value": 9, "min_factor": 2, "max_factor": 9, "styles": ("plain",)},
        lambda m: f"Simplify {m['numerator']}/{m['denominator']}.",
    ),
    "gcd": Task(
        {"max_value": 30},
        lambda m: f"Greatest common divisor of {_listed(m['numbers'])}:",
        differ="result",
    ),
    "lcm": Task({"max_value": 20}, lambda m: f"Least common multiple of {_listed(m['numbers'])}:"),
    "caesar_cipher": Task({"min_words": 1, "max_words": 2, "max_rotation": 1}),
    "prime_factorization": Task({"max_value": 60}, lambda m: f"Prime factors of {m['number']}:"),
    "palindrome_generation": Task(
        {"min_length": 3, "max_length": 5, "size": 50},
        lambda m: f"Form a palindrome of these letters: {_listed(m['letters'])}",
    ),
    "letter_jumble": Task(
        {"min_word_len": 2, "max_word_len": 5, "min_words": 3, "max_words": 4, "max_corruption_level": 0.2},
        lambda m: f"Unscramble the words: {' '.join(m['scrambled_words'])}",
    ),
    "spiral_matrix": Task(
        {"max_n": 2},
        lambda m: "Spiral order of " + " / ".join(" ".join(map(str, row)) for row in m["matrix"]),
    ),
    "countdown": Task(
        {
            "min_numbers": 2,
            "max_numbers": 3,
            "max_value": 9,
            "min_target": 2,
            "max_target": 30,
            "operators": ("+", "-", "*"),
        },
        lambda m: f"Make {m['target']} of the numbers {_listed(m['numbers'])}.",
    ),
}

MIX = ("number_sorting", "letter_counting", "gcd")
"""The tasks of the world unless others are named."""
