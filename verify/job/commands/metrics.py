"""Run ``flashpatch metrics``: write a job's state in Prometheus's text format."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "a job's state in Prometheus's text format"


def arguments(parser: argparse.ArgumentParser) -> None:
    from flashpatch.verify.job import source

    source.arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="replace this file atomically; unset: standard output",
    )


def run(args: argparse.Namespace) -> int:
    """Write the metrics; return 0. ``--json`` gives what they are made of.

    Raises:
        PatchError: there is no such run, or the file cannot be written.
    """
    import json

    from flashpatch import registry
    from flashpatch.errors import PatchError
    from flashpatch.patches._shared.atomic_file import replacing
    from flashpatch.verify.job import collect, prometheus, source

    found = source.load(source.chosen(args))
    job = collect.job(found, registry.patches())
    text = json.dumps(collect.finite(job), indent=2) + "\n" if args.json else prometheus.text(found, job)
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        with replacing(args.output, private=False) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PatchError(
            f"{args.output} cannot be written: {error}", advice="Name another file by -o."
        ) from None
    return 0
