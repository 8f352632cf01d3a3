"""Hold what the user's files say: variables, Hydra overrides, arguments of programs, and data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashpatch.errors import PatchError
from flashpatch.migration import shell

LIMIT = 1 << 20
"""Bytes that a script or a YAML file may have."""
_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<path>[A-Za-z_][\w@/-]*(?:\.[\w@-]+)*)=(?P<value>.*)", re.S)
_YAML_ANCHOR = re.compile(
    r"(^|[\s\[{,:-])[&*][^\s&*]"
)  # they make small files large, and no fork writes them


@dataclass(frozen=True)
class Setting:
    """Hold one setting of the user's.

    Attributes:
        name: ``FLASHRL_CONFIG``, ``actor_rollout_ref.rollout.n`` or ``--batch_size``.
        value: its text; ``True`` for an argument without a value.
        place: where it stands, such as ``run.sh:12``.
        sign: ``+``, ``++`` or ``~`` before an override, else empty.
    """

    name: str
    value: str
    place: str
    sign: str = ""

    def __str__(self) -> str:
        space = " " if self.name.startswith("-") else "="
        return f"{self.sign}{self.name}{space}{self.value}"

    @property
    def is_open(self) -> bool:
        """Whether only a run of the script could tell the value."""
        return shell.is_open(self.value)


@dataclass(frozen=True)
class Call:
    """Hold one call of a program.

    Attributes:
        launcher: what runs it, such as ``torchrun`` or ``python3``; empty where the program is called itself.
        program: ``trainer_core.py``, ``verl.trainer.main_ppo`` or ``flashrl``.
        launcher_arguments, arguments: ``--name value`` by name, those of the launcher apart.
        plain: words that are neither arguments nor overrides.
        place: where it stands.
    """

    launcher: str
    program: str
    launcher_arguments: Mapping[str, Setting]
    arguments: Mapping[str, Setting]
    plain: tuple[str, ...]
    place: str


@dataclass
class Given:
    """Hold everything that was given; what is said later wins.

    Attributes:
        variables: environment variables by name.
        overrides: settings of the training configuration by path.
        calls: calls of programs, in order.
        documents: content of YAML files by path.
        files: other files that were given, such as pickled profiles; a family takes out what it has read.
        remarks: sentences about how far the files could be read.
    """

    variables: dict[str, Setting] = field(default_factory=dict)
    overrides: dict[str, Setting] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    documents: dict[Path, Any] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def add_script(self, text: str, place: str, environ: Mapping[str, str] | None = None) -> None:
        """Read a shell script.

        Raises:
            PatchError: its quotes or brackets are nested too deeply to be read.
        """
        try:
            script = shell.read(text, environ)
        except RecursionError:
            raise PatchError(
                f"{place}: brackets are nested too deeply.", advice="Write it plainer."
            ) from None
        for name, word in script.variables.items():
            self.variables[name] = Setting(name, word.text, f"{place}:{word.line}")
        for command in script.commands:
            self._add_command(command, place)
        if script.branches:
            self.remarks.append(
                f"{place} has branches or loops: what is in them was read as if each ran once."
            )

    def add_yaml(self, text: str, path: Path) -> None:
        """Read a YAML file as plain data.

        Raises:
            PatchError: PyYAML is not installed, or the file is not plain YAML.
        """
        data = plain_yaml(text, path)
        self.documents[path] = data
        variables = data.get("env_vars") if isinstance(data, dict) else None
        for name, value in variables.items() if isinstance(variables, dict) else ():
            self.variables[str(name)] = Setting(str(name), str(value), str(path))
        for name, value in _flat(data) if isinstance(data, dict) else ():
            if not name.startswith(("env_vars.", "configs")):
                self.overrides[name] = Setting(name, value, str(path))

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Take the variables of this process."""
        for name, value in environ.items():
            self.variables[name] = Setting(name, value, "the environment")

    def add_words(self, words: list[str]) -> None:
        """Take NAME=VALUE words: an override where the name has a dot or a sign, else a variable."""
        for word in words:
            found = _OVERRIDE.fullmatch(word)
            if not found:
                raise PatchError(
                    f"{word!r} is no file and no NAME=VALUE.", advice="Give a file that is there."
                )
            setting = Setting(found["path"], found["value"], "the command line", found["sign"] or "")
            into = self.overrides if "." in setting.name or setting.sign else self.variables
            into[setting.name] = setting

    def _add_command(self, command: shell.Command, place: str) -> None:
        texts = [word.text for word in command.words]
        at = _program(texts)
        later = self._sort(command.words[at + 1 :], place, overrides=True)
        before = self._sort(command.words[1:at], place, overrides=False) if at else ({}, ())
        where = f"{place}:{command.words[0].line}"
        launcher = texts[0] if at else ""
        self.calls.append(Call(launcher, Path(texts[at]).name, before[0], *later, where))

    def _sort(
        self, words: tuple[shell.Word, ...], place: str, overrides: bool
    ) -> tuple[dict[str, Setting], tuple[str, ...]]:
        """Return the arguments and the plain words; overrides go to ``self.overrides``."""
        arguments: dict[str, Setting] = {}
        plain: list[str] = []
        name = ""  # of the argument that the next word may be the value of
        for word in words:
            found = _OVERRIDE.fullmatch(word.text)
            where = f"{place}:{word.line}"
            if re.match(r"--?[A-Za-z]", word.text):
                name, equals, value = word.text.partition("=")
                arguments[name] = Setting(name, value if equals else "True", where)
                name = "" if equals else name
            elif name:
                arguments[name] = Setting(name, word.text, where)
                name = ""
            elif found and overrides:
                self.overrides[found["path"]] = Setting(
                    found["path"], found["value"], where, found["sign"] or ""
                )
            else:
                plain.append(word.text)
        return arguments, tuple(plain)


def _program(texts: list[str]) -> int:
    """Return the position of the program in a command: after ``-m``, a Python file, or the first word."""
    for at, text in enumerate(texts):
        if (
            text == "-m"
            and at + 1 < len(texts)
            and Path(texts[0]).name.startswith(("python", "torchrun", "ray"))
        ):
            return at + 1
        if at and text.endswith(".py"):
            return at
    return 0


def plain_yaml(text: str, path: Path) -> Any:
    """Return the plain data in YAML text.

    Raises:
        PatchError: PyYAML is not installed, or it is not plain YAML, or it has anchors.
    """
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise PatchError(f"{path} is YAML, and PyYAML is not installed.", advice="Install PyYAML.") from error
    if _YAML_ANCHOR.search(re.sub(r"'[^']*'|\"[^\"]*\"|#[^\n]*", "", text)):
        raise PatchError(f"{path} uses YAML anchors.", advice="Write the entries out.")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise PatchError(
            f"{path} is not plain YAML ({str(error).splitlines()[0][:80]}).",
            advice="Give a shell script, or a YAML file without tags.",
        ) from error


def _flat(data: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", "null" if value is None else str(value)
