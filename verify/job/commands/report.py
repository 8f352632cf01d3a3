"""Run ``flashpatch report``: write a page that shows what a job did."""

from __future__ import annotations

import argparse
import gc
import json

from flashpatch.verify.job import collect, page, source

HELP = "one HTML page that shows what a job did"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "run", "ledger", "report")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or with ``--json`` print what it shows; return 0."""
    folder = source.found(args)
    gc.disable()  # a large job is many objects, none of them in a cycle
    found = collect.read(folder)
    if args.json:
        return source.written(args, json.dumps(found, indent=2) + "\n")
    return source.written(args, page.render(found), f"{folder.name}.html")
