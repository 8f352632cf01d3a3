"""Run ``flashpatch trace``: write a job's updates, syncs, steps and refusals as trace events."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HELP = "trace events of a job's updates, syncs, steps and refusals, for Perfetto and Chrome"


def arguments(parser: argparse.ArgumentParser) -> None:
    from flashpatch.verify.job import source

    source.output(parser, "where to write it; unset: RUN.trace.json, here")


def run(args: argparse.Namespace) -> int:
    """Write the trace and print its path, or with ``--json`` print it; return 0."""
    from flashpatch.verify.job import collect, source, trace

    folder = source.chosen(args)
    found = source.load(folder)
    text = json.dumps(collect.finite(trace.trace(found, collect.names(found))))
    if args.json:
        print(text)
        return 0
    output = args.output or Path(f"{folder.name}.trace.json")
    source.save(output, text)
    print(output)
    return 0
