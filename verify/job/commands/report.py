"""Run ``flashpatch report``: write a page that shows what a job did."""

from __future__ import annotations

import argparse

from flashpatch.verify.job import collect, page, source

HELP = "one HTML page that shows what a job did"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "run", "ledger", "report")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path, or with ``--json`` print what it shows; return 0."""
    folder = source.found(args)
    found = collect.read(folder)
    return source.written(args, f"{folder.name}.html", found, page.render)
