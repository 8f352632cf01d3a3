"""Run ``flashpatch migrate``: print the configuration that does what a retired research fork was told.

What a setting becomes is data: ``patches/migrate.toml``, whose head explains it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from flashpatch import registry
from flashpatch.errors import PatchError
from flashpatch.settings import options

HELP = (
    "print the flashpatch.toml that does what FlashRL, FastRL, FlowRL or async-grpo was told; nothing is run"
)
_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<name>-{0,2}[A-Za-z_][\w@/.-]*)=(?P<value>.*)", re.S)
_LIMIT = 1 << 20
"""Bytes that a file may have."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fork and the files."""
    parser.add_argument("--from", dest="fork", metavar="FORK", required=True, choices=_forks())
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="file of NAME=VALUE and --name value, or NAME=VALUE itself; without any: this environment's variables",
    )


def run(args: argparse.Namespace) -> int:
    """Print the configuration; return 1 if something could not be carried over, named on standard error too.

    Raises:
        PatchError: a file that cannot be read, or a word that is neither a file nor NAME=VALUE.
    """
    outcome = Outcome(_table()[args.fork], read(args.files))
    text = outcome.text(args.fork)
    print(json.dumps({**vars(outcome), "toml": text}, indent=2) if args.json else text)
    for line in outcome.lost:
        print(f"not carried over: {line}", file=sys.stderr)
    return int(bool(outcome.lost))


class Outcome:
    """Apply a fork's table to what was given.

    Args:
        fork: its table in ``patches/migrate.toml``.
        given: name of a setting to its text.

    Attributes:
        enable: names to switch on.
        options: family to option to value.
        take_out: settings that go from verl's command line.
        verl: settings to add to verl's command line, or to change there.
        otherwise, lost: a line for each setting that is done in another way, or not at all.
    """

    def __init__(self, fork: dict[str, Any], given: dict[str, str]) -> None:
        self.enable: list[str] = []
        self.options: dict[str, dict[str, Any]] = {}
        self.take_out: list[str] = []
        self.verl: dict[str, str] = {}
        self.otherwise: list[str] = []
        self.lost: list[str] = []
        self._act("", "", fork.get("always", {}))
        settings = {**fork["settings"], **_table()["verl"]["settings"]}
        for pattern, action in settings.items():
            stem = pattern.removesuffix("*")
            found = [name for name in given if name == pattern or (stem != pattern and name.startswith(stem))]
            for name in found:
                self._act(name, given[name], action, name.removeprefix(stem))
        known = [pattern.removesuffix("*") for pattern in settings]
        for name in given:
            if name.startswith(tuple(fork["own"])) and not any(map(name.startswith, known)):
                self.lost.append(f"{name}={given[name]}: not a known setting")

    def _act(self, name: str, value: str, action: dict[str, Any], rest: str = "") -> None:
        """Do what the table says of one setting; ``rest`` is what the pattern's ``*`` stands for."""
        what = f"{name}={value}"
        cases = {one: case for key, case in action.get("values", {}).items() for one in key.split("|")}
        action = {**action, **cases.get(value.lower(), cases.get("*", {}))}
        if re.search(r"[$`]", value) and ("option" in action or cases):
            self.lost.append(f"{what}: only a shell could tell the value")
            return
        if action.get("keep"):
            self.verl.pop(name, None)
        elif "." in name:
            self.take_out.append(name)
        if "enable" in action:
            self.enable = [action["enable"]]
        if "option" in action:
            self._set(what, action, value)
        for path, template in action.get("verl", {}).items():
            self.verl[path.replace("{rest}", rest)] = template.replace("{}", value)
        if "note" in action:
            self.otherwise.append(f"{what}: {action['note']}" if name else action["note"])
        if "lost" in action:
            self.lost.append(f"{what}: {action['lost']}" if name else action["lost"])

    def _set(self, what: str, action: dict[str, Any], value: str) -> None:
        """Set the action's option to a value, in the option's type; one that it does not take is lost."""
        family, _, name = action["option"].partition(".")
        record = registry.family(family)
        text = action.get("value", "{}")
        text = text.replace("{}", value) if isinstance(text, str) else text
        held = self.options.get(family, {})
        try:
            made = _typed(record.options[name].kind, text)
            made = [*held.get(name, ()), *made] if action.get("append") else made
            options.checked(record, {name: made}, f"[{family}]")
        except (PatchError, ValueError) as error:
            problem = error.problem if isinstance(error, PatchError) else str(error)
            self.lost.append(f"{what}: {name} in [{family}] does not take {text!r} ({problem.rstrip('.')})")
            return
        self.options[family] = {**held, name: made}

    def text(self, fork: str) -> str:
        """Return the configuration as TOML, everything else in comments."""
        lines = [f"# What {fork} was told, for FlashPatch.", "", f"enable = {json.dumps(self.enable)}"]
        for family, held in self.options.items():
            lines += ["", f"[{family}]", *(f"{name} = {json.dumps(value)}" for name, value in held.items())]
        for title, said in {
            "Take out of verl's command": self.take_out,
            "Add to verl's command, or change there": [f"{path}={self.verl[path]}" for path in self.verl],
            "Done otherwise": self.otherwise,
            "Not carried over": self.lost,
        }.items():
            lines += ["", f"# {title}:", *(f"#   {_clean(line)}" for line in said)] if said else []
        return "\n".join(lines)


def read(files: list[str]) -> dict[str, str]:
    """Return settings by name, from files and NAME=VALUE words, later ones winning; else the environment's.

    Raises:
        PatchError: a file that cannot be read, or a word that is neither.
    """
    if not files:
        return dict(os.environ)
    given: dict[str, str] = {}
    for name in files:
        found = None if Path(name).is_file() else _WORD.fullmatch(name)
        given |= {found["name"]: found["value"]} if found else _settings(_words(Path(name)))
    return given


def _words(path: Path) -> list[str]:
    """Return the words of a file as a shell splits them; nothing is expanded. Lines of comment are left out."""
    try:
        if path.stat().st_size > _LIMIT:
            raise PatchError(f"{path} is larger than {_LIMIT >> 20} MiB.", advice="Give NAME=VALUE lines.")
        lines = path.read_text("utf-8").replace("\\\n", " ").splitlines()
        return shlex.split("\n".join(line for line in lines if not line.lstrip().startswith("#")))
    except (OSError, ValueError) as error:
        raise PatchError(
            f"cannot read {path}: {error}.", advice="Give a file of NAME=VALUE lines."
        ) from error


def _settings(words: list[str]) -> dict[str, str]:
    """Return the settings among the words of a file: NAME=VALUE, and ``--name`` followed by its value."""
    given = {}
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        found = _WORD.fullmatch(word)
        if found:
            given[found["name"]] = found["value"]
        elif re.fullmatch(r"--[a-z]\w*", word):
            given[word] = "True" if after.startswith("--") else after
    return given


def _typed(kind: type, text: Any) -> Any:
    """Return a value in an option's type; lists as Hydra writes them. Raises ValueError: it is none."""
    if not isinstance(text, str):
        return text
    if kind is list:
        return [item.strip(" '\"") for item in text.strip("[] ").split(",") if item.strip(" '\"")]
    if kind is bool:
        return text.lower() in ("true", "1", "yes", "on")
    return kind(text)


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _forks() -> list[str]:
    return [name for name in _table() if name != "verl"]


def _table() -> dict[str, Any]:
    path = Path(import_module("flashpatch.patches").__path__[0]) / "migrate.toml"
    return tomllib.loads(path.read_text("utf-8"))
