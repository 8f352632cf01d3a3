"""The command ``flashpatch``.

A subcommand is a module with three names: ``HELP``, one line; ``arguments(parser)``, which adds what it
takes; and ``run(args)``, which prints through `flashpatch.commands.report` and returns the exit code. All of them take
``--json``, and none imports a framework or torch when it is imported. The built-in ones are those of
`flashpatch.registry.BUILT_IN_COMMANDS`; families bring more, see `flashpatch.record.Family.commands`.

Exit codes: 0 all well, 1 something that was asked for is not, 2 wrong usage."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from flashpatch import __version__, index, registry
from flashpatch.commands.report import reader_left
from flashpatch.errors import PatchError, nearest


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; wrong usage raises SystemExit(2), as argparse does."""
    argv = sys.argv[1:] if argv is None else argv
    asked = argv[0] if argv else ""
    if asked and not asked.startswith("-") and asked not in registry.commands():
        print(f"flashpatch: there is no command {asked!r}. {_meant(asked)}", file=sys.stderr)
        return 2
    parser = _parser(asked)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        return reader_left()
    except PatchError as error:
        engine = sys.modules.get("flashpatch.engine")
        if engine is None or engine.problem != str(error):  # which the start of this process has printed
            print(error, file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "flashpatch").partition(".")[0] == "flashpatch":
            raise
        problem = f"'flashpatch {args.command}' needs {error.name}, which is not installed."
        print(PatchError(problem, advice=f"Install {error.name} into {sys.prefix}."), file=sys.stderr)
    return 1


def _meant(word: str) -> str:
    """Return what may be meant by a word that is no command."""
    name = word.lower()
    if index.family_of(name) is not None:
        return (
            f"`flashpatch list {name}` shows the patches of {name}, `flashpatch-verify {name}` proves them."
        )
    if word == "flashpatch-verify":
        return f"`{word}` is a command of its own."
    return nearest(word, [*registry.commands(), "flashpatch-verify"])


def _parser(asked: str) -> argparse.ArgumentParser:
    """The parser for a command line that begins with ``asked``: of all commands, unless that is one."""
    about = "Show what FlashPatch offers, what applies here, and what jobs did."
    parser = argparse.ArgumentParser(prog="flashpatch", description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subcommands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    known = {} if asked == "--version" else registry.commands()
    for name in [asked] if asked in known else known:
        module = _load(known[name])
        inner = subcommands.add_parser(name, help=module.HELP, description=module.HELP)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.set_defaults(run=module.run, usage_error=inner.error)
        module.arguments(inner)
    return parser


def _load(where: str) -> ModuleType | _Broken:
    """A command's module; a family's that cannot be imported must not take the other commands along."""
    try:
        return import_module(where)
    except Exception as error:
        if where in registry.BUILT_IN_COMMANDS.values():
            raise
        return _Broken(where, error)


class _Broken:
    """Stands for a command whose module cannot be imported: listed, and says why when it is run."""

    def __init__(self, where: str, error: Exception) -> None:
        self._where = where
        self._error = error
        self.HELP = f"not available: {type(error).__name__}: {error}".replace("%", "%%")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("anything", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        raise PatchError(
            f"the command cannot be loaded from {self._where}: {type(self._error).__name__}: {self._error}",
            advice="Reinstall the package that brings it.",
        ) from self._error
