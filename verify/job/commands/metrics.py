"""Run ``flashpatch metrics``: write a job's state in Prometheus's text format."""

from __future__ import annotations

import argparse
import gc
import json

from flashpatch import registry
from flashpatch.verify import live
from flashpatch.verify.job import collect, prometheus, source
from flashpatch.verify.read_events import Recorded

HELP = "a job's state in Prometheus's text format"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "run", "ledger", "metrics")


def run(args: argparse.Namespace) -> int:
    """Write the metrics, or with ``--json`` what they are made of; return 0."""
    folder = source.found(args)
    gc.disable()  # a large job is many objects, none of them in a cycle
    found = Recorded(folder)
    if args.json:
        return source.written(args, json.dumps(collect.job(found, registry.patches()), indent=2) + "\n")
    return source.written(args, prometheus.text(found, live.judge(found.run, registry.patches())))
