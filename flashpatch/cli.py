"""The command ``flashpatch``.

A subcommand is a module with three names: ``HELP``, one line; ``arguments(parser)``, which adds what it
takes; and ``run(args)``, which prints through `flashpatch.report` and returns the exit code. A new one is a
line in ``COMMANDS``. All of them take ``--json``, and none imports a framework or torch.

Exit codes: 0 all well, 1 something that was asked for is not, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from flashpatch import __version__
from flashpatch.errors import PatchError

COMMANDS = {
    "list": "flashpatch.commands.list",
    "show": "flashpatch.commands.show",
    "env": "flashpatch.commands.env",
    "status": "flashpatch.commands.status",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code; wrong usage raises SystemExit(2), as argparse does."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except PatchError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    about = "What FlashPatch can do, would do, and did."
    parser = argparse.ArgumentParser(prog="flashpatch", description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = import_module(module)
        inner = commands.add_parser(name, help=command.HELP, description=command.HELP)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.set_defaults(run=command.run, usage_error=inner.error)
        command.arguments(inner)
    return parser
