"""Run ``flashpatch report``: write a page that shows what a job did."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HELP = "one HTML page that shows what a job did"


def arguments(parser: argparse.ArgumentParser) -> None:
    from flashpatch.verify.job import source

    source.output(parser, "where to write the page; unset: RUN.html, here")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or with ``--json`` print what it shows; return 0."""
    from flashpatch.verify.job import collect, page, source

    folder = source.chosen(args)
    found = collect.read(folder)
    if args.json:
        json.dump(found, sys.stdout, indent=2, default=repr)
        print()
        return 0
    output = args.output or Path(f"{folder.name}.html")
    source.save(output, page.render(found))
    print(output)
    return 0
