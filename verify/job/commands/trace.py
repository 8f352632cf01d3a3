"""Run ``flashpatch trace``: write a job's updates, syncs, steps and refusals as trace events."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HELP = "trace events of a job's updates, syncs, steps and refusals, for Perfetto and Chrome"


def arguments(parser: argparse.ArgumentParser) -> None:
    from flashpatch.verify.job import source

    source.arguments(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="where to write it; unset: RUN.trace.json, here"
    )


def run(args: argparse.Namespace) -> int:
    """Write the trace and print its path, or with ``--json`` print it; return 0.

    Raises:
        PatchError: there is no such run, or the file cannot be written.
    """
    from flashpatch.errors import PatchError
    from flashpatch.verify.job import collect, source, trace

    folder = source.chosen(args)
    found = source.load(folder)
    text = json.dumps(collect.finite(trace.trace(found, collect.names(found))))
    if args.json:
        sys.stdout.write(text + "\n")
        return 0
    output = args.output or Path(f"{folder.name}.trace.json")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PatchError(f"the trace cannot be written: {error}", advice="Name another file by -o.") from None
    print(output)
    return 0
