"""Run ``flashpatch report``: write a page that shows what a job did."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from flashpatch.verify.job import collect, page, source

HELP = "one HTML page that shows what a job did"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.output(parser, "where to write the page; unset: RUN.html, here")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or with ``-o -`` the page, with ``--json`` what it shows; return 0."""
    folder = source.chosen(args)
    found = collect.read(folder)
    if args.json or str(args.output) == "-":
        print(json.dumps(found, indent=2) if args.json else page.render(found))
        return 0
    output = args.output or Path(f"{folder.name}.html")
    source.save(output, page.render(found))
    print(output)
    return 0
