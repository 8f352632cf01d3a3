"""Run ``flashpatch trace``: write a job's updates, syncs, steps and refusals as trace events."""

from __future__ import annotations

import argparse
import json

from flashpatch.verify.job import collect, source, trace

HELP = "trace events of a job's updates, syncs, steps and refusals, for Perfetto and Chrome"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.output(parser, "where to write it; unset: RUN.trace.json, here")


def run(args: argparse.Namespace) -> int:
    """Write the trace and print its path, or with ``--json`` print it; return 0."""
    folder = source.chosen(args)
    found = source.load(folder)
    events = trace.trace(found, collect.names(found))
    return source.written(args, f"{folder.name}.trace.json", events, json.dumps)
