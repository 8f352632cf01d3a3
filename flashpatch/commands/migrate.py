"""Run ``flashpatch migrate``: print the configuration that does what a research fork was told."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path

from flashpatch import registry
from flashpatch.errors import PatchError
from flashpatch.migration.given import LIMIT, Given
from flashpatch.migration.plan import Plan

HELP = (
    "print the flashpatch.toml that does what FlashRL, FastRL, FlowRL or async-grpo was told; nothing is run"
)
_YAML = (".yaml", ".yml")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fork and the files."""
    known = ", ".join(registry.migrations())
    parser.add_argument("--from", dest="fork", metavar="FORK", required=True, help=f"one of {known}")
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="shell script, YAML file, FlashRL's profile, or NAME=VALUE; without any: this environment's variables",
    )


def run(args: argparse.Namespace) -> int:
    """Print the configuration; return 1 when something could not be carried over, named on standard error too.

    Raises:
        PatchError: a file that cannot be read, or that is refused.
    """
    known = registry.migrations()
    if args.fork not in known:
        args.usage_error(f"--from {args.fork}: choose from {', '.join(known)}")
    given = read(args.files)
    module = import_module(known[args.fork])
    plan = Plan(module.HELP.partition(":")[0])
    module.migrate(given, plan)
    for path in given.files:
        plan.lose(
            str(path), f"neither a script nor YAML, and {plan.fork} has no other files that are read here"
        )
    sources = ", ".join(args.files) or "the environment"
    text = plan.text(sources, given.remarks)
    if args.json:
        import json

        sections = plan.sections()
        data = {
            "from": args.fork,
            "enable": plan.names,
            "options": plan.tables,
            "take_out": list(plan.taken_out),
            "verl": {path: value for path, (value, _) in plan.verl.items()},
            "otherwise": sections["Done otherwise"],
            "not_carried_over": sections["Not carried over"],
            "toml": text,
        }
        print(json.dumps(data, indent=2))
    else:
        print(text, end="")
    for what, why in plan.lost:
        print(f"not carried over: {what}: {why}", file=sys.stderr)
    return int(bool(plan.lost))


def read(files: list[str]) -> Given:
    """Read files and NAME=VALUE words; the environment where there are none.

    Raises:
        PatchError: a file that is missing, too large, or of a kind that cannot be read.
    """
    given = Given()
    if not files:
        given.add_environment(os.environ)
    words = []
    for name in files:
        path = Path(name)
        if not path.is_file() and "=" in name:
            words.append(name)
        elif path.suffix in _YAML:
            given.add_yaml(_text(path), path)
        elif _is_text(path):
            given.add_script(_text(path), name, os.environ)
        else:
            given.files.append(path)
    given.add_words(words)
    return given


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
        if len(data) > LIMIT:
            raise PatchError(
                f"{path} is larger than {LIMIT >> 20} MiB.", advice="Give a script or a YAML file."
            )
        return data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchError(f"cannot read {path}: {error}.", advice="Give a script or a YAML file.") from error


def _is_text(path: Path) -> bool:
    """Whether a file looks like text: no zero byte at its start. Raises PatchError: it cannot be read."""
    try:
        with path.open("rb") as file:
            start = file.read(4096)
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error}.", advice="Give a file that is there.") from error
    return b"\0" not in start and start[:1] != b"\x80"
