"""Read the commands of a shell script without running any of them.

Variables, defaults (``${NAME:-value}``), arrays, quotes and integer arithmetic are expanded as bash does. What only
a run could tell (``$(command)``, ``$1``, unset variables) stays in the text as it is written, see `is_open`.
Branches and loops are not followed: the commands in them are read once each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from flashpatch.migration import arithmetic

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.S)
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=])(.*))?", re.S)
_KEYWORDS = frozenset("if then elif else fi for while until do done case esac function { } ! time".split())
_BRANCHES = frozenset("if for while until case".split())
_PREFIXES = frozenset("export declare local readonly typeset env".split())


class Word(NamedTuple):
    """One word of a command, expanded, and the line on which it stands, from 1."""

    text: str
    line: int


class Command(NamedTuple):
    """Hold the words of one command; assignments before it are in `Script.variables`."""

    words: tuple[Word, ...]


@dataclass
class Script:
    """Hold what a script says.

    Attributes:
        commands: in order.
        variables: the last value of each variable that the script sets, with its line.
        branches: whether it has branches or loops, which are not followed.
    """

    commands: list[Command] = field(default_factory=list)
    variables: dict[str, Word] = field(default_factory=dict)
    branches: bool = False


def is_open(text: str) -> bool:
    """Whether a value holds something that only a run of the script could tell."""
    return "$" in text or "`" in text


def read(text: str, environ: Mapping[str, str] | None = None) -> Script:
    """Read a script.

    Args:
        text: the script.
        environ: variables that it would find; none by default.
    """
    reader = _Reader(text, dict(environ or {}))
    reader.read()
    return reader.script


class _Reader:
    """Go through a text once, character by character, from ``at``."""

    def __init__(self, text: str, known: dict[str, str], arrays: dict[str, list[str]] | None = None) -> None:
        self.text, self.known = text, known
        self.arrays: dict[str, list[str]] = {} if arrays is None else arrays
        self.plain = False  # words are words: no assignments, no keywords
        self.script = Script()
        self.at, self.line = 0, 1
        self.words: list[Word] = []
        self.word: str | None = None
        self.skip = False  # the next word is the file of a redirection
        self.here: list[str] = []  # delimiters of here-documents that begin on the next line

    def read(self) -> None:
        while self.at < len(self.text):
            self._step(self.text[self.at])
        self._end_command()

    def _step(self, char: str) -> None:
        if char == "\\":
            self._escape()
        elif char in " \t\r":
            self._end_word()
            self.at += 1
        elif char == "\n":
            self._end_command()
            self._newline()
        elif char == "#" and self.word is None:
            self.at = self._find("\n", self.at)
        elif char in ";&|)":
            self._end_command()
            self.at += 1
        elif char in "<>":
            self._redirect()
        elif char == "(":
            self._parenthesis()
        elif char == "'":
            end = self._find("'", self.at + 1)
            self._add(self.text[self.at + 1 : end])
            self._move(end + 1)
        elif char == '"':
            self._double()
        elif char in "$`":
            self._unquoted()
        else:
            self._add(char)
            self.at += 1

    def _find(self, what: str, start: int) -> int:
        found = self.text.find(what, start)
        return len(self.text) if found < 0 else found

    def _move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _add(self, text: str) -> None:
        self.word = (self.word or "") + text

    def _newline(self) -> None:
        self._move(self.at + 1)
        for delimiter in self.here:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$", re.M).search(self.text, self.at)
            self._move(end.end() if end else len(self.text))
        self.here.clear()

    def _escape(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following != "\n":
            self._add(following)
        self._move(self.at + 2)

    def _redirect(self) -> None:
        if self.word is not None and self.word.isdigit():
            self.word = None
        self._end_word()
        if self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
            found = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?").match(self.text, self.at)
            if found:
                self.here.append(found[1])
                self._move(found.end())
                return
        while self.text[self.at : self.at + 1] in ("<", ">", "&", "|"):
            self.at += 1
        self.skip = True

    def _parenthesis(self) -> None:
        name = self.word[:-1] if self.word and self.word.endswith("=") else ""
        if not _NAME.fullmatch(name.removesuffix("+")):
            self._end_command()  # a subshell, or the head of a function
            self.at += 1
            return
        end = self._closing(self.at)
        inner = _Reader(self.text[self.at + 1 : end - 1], self.known, self.arrays)
        inner.plain = True
        inner.read()
        values = [word.text for command in inner.script.commands for word in command.words]
        plain = name.removesuffix("+")
        self.arrays[plain] = [*(self.arrays.get(plain, []) if name.endswith("+") else []), *values]
        self.word = None
        self._move(end)

    def _closing(self, start: int) -> int:
        """Return the position after the bracket that closes the one at ``start``, quotes left out."""
        pairs = {"(": ")", "{": "}"}
        opening, depth, quote, at = self.text[start], 0, "", start
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == opening:
                depth += 1
            elif char == pairs[opening]:
                depth -= 1
                if not depth:
                    return at + 1
            at += 1
        return len(self.text)

    def _double(self) -> None:
        self.at += 1
        self._add("")
        for values in self._quoted('"'):
            for number, value in enumerate(values):  # the elements of an array are words of their own
                if number:
                    self._end_word()
                self._add(value)
        self.at += 1

    def _quoted(self, end: str) -> Iterator[list[str]]:
        """Yield the parts up to the quote ``end``, expanded; without ``end`` all, quotes left out."""
        while self.at < len(self.text) and (char := self.text[self.at]) != end:
            following = self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following and following in '"\\$`\n':
                yield [following.strip("\n")]
                self._move(self.at + 2)
            elif char in "$`":
                yield self._expand()
            else:
                yield ["" if not end and char in "\"'" else char]
                self._move(self.at + 1)

    def _unquoted(self) -> None:
        """Expand outside of quotes: the value is split at spaces, but in an assignment."""
        assigns = all(_is_head(before.text) for before in self.words)
        whole = assigns and self.word is not None and _ASSIGNMENT.fullmatch(self.word)
        for number, part in enumerate(
            part for value in self._expand() for part in _split(value, bool(whole))
        ):
            if number:
                self._end_word()
            self._add(part)

    def _expand(self) -> list[str]:
        """Return the values of the expansion that begins here, and move behind it."""
        text, start = self.text, self.at
        if text[start] == "`":
            self._move(min(self._find("`", start + 1) + 1, len(text)))
            return [text[start : self.at]]
        if text.startswith("$((", start):
            self._move(self._closing(start + 1))
            found = arithmetic.value(text[start + 3 : self.at - 2], self.known)
            return [text[start : self.at] if found is None else str(found)]
        if text.startswith("$(", start):
            self._move(self._closing(start + 1))
            return [text[start : self.at]]
        if text.startswith("${", start):
            self._move(self._closing(start + 1))
            return self._braced(text[start + 2 : self.at - 1], text[start : self.at])
        name = _NAME.match(text, start + 1)
        self.at = (
            name.end() if name else start + 1 + (text[start + 1 : start + 2] in tuple("@*#?$!-0123456789"))
        )
        written = text[start : self.at]
        return [self.known.get(written[1:], written)]

    def _braced(self, inside: str, written: str) -> list[str]:
        found = _BRACED.fullmatch(inside)
        if not found:
            return [written]
        name, whole, operator, default = found.groups()
        if whole:
            return self.arrays.get(name, [written])
        value = self.known.get(name)
        if value is None or (not value and operator and operator.startswith(":")):
            return [written] if operator is None else [self._default(default)]
        return [value]

    def _default(self, text: str) -> str:
        inner = _Reader(text, self.known, self.arrays)
        value = "".join(" ".join(values) for values in inner._quoted(""))
        return _Whole(value) if text[:1] in ("'", '"') else value

    def _end_word(self) -> None:
        word, self.word = self.word, None
        if word is None:
            return
        if self.skip:
            self.skip = False
            return
        found = _ASSIGNMENT.fullmatch(word)
        if found and not self.plain and all(_is_head(before.text) for before in self.words):
            appended = word[len(found[1])] == "+"
            self.known[found[1]] = (self.known.get(found[1], "") if appended else "") + found[2]
        self.words.append(Word(word, self.line))

    def _end_command(self) -> None:
        self._end_word()
        self.skip = False
        words, self.words = self.words, []
        while words and not self.plain and words[0].text in _KEYWORDS:
            self.script.branches |= words[0].text in _BRANCHES
            words = words[1:]
        rest = words if self.plain else list(self._assigned(words))
        if rest:
            self.script.commands.append(Command(tuple(rest)))

    def _assigned(self, words: list[Word]) -> Iterator[Word]:
        """Take the assignments at the start of a command; yield its other words."""
        if words and words[0].text in _PREFIXES:
            words = [word for word in words[1:] if not word.text.startswith("-")]
        elif words and words[0].text == "set" and (fish := _fish(words)):
            self._assign(*fish)
            return
        while words and (found := _ASSIGNMENT.fullmatch(words[0].text)):
            self._assign(found[1], Word(self.known[found[1]], words[0].line))
            words = words[1:]
        yield from words

    def _assign(self, name: str, value: Word) -> None:
        self.known[name] = value.text
        self.script.variables[name] = value


class _Whole(str):
    """A value that was quoted where it stands, and is not split."""


def _is_head(text: str) -> bool:
    """Whether assignments may follow a word: it is one, or ``export`` or an option of it."""
    return text in _PREFIXES or text in _KEYWORDS or text.startswith("-") or bool(_ASSIGNMENT.fullmatch(text))


def _split(value: str, whole: bool) -> list[str]:
    """Split a value that was not quoted; one that a run would have to tell stays whole."""
    return [value] if whole or isinstance(value, _Whole) or is_open(value) else value.split()


def _fish(words: list[Word]) -> tuple[str, Word] | None:
    """Return name and value of fish's ``set -x NAME VALUE``; None for bash's ``set``."""
    plain = [word for word in words[1:] if not word.text.startswith("-") and word.text != "="]
    if len(plain) < 2 or not _NAME.fullmatch(plain[0].text):
        return None
    return plain[0].text, Word(" ".join(word.text for word in plain[1:]), words[0].line)
