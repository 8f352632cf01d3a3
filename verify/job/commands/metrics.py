"""Run ``flashpatch metrics``: write a job's state in Prometheus's text format."""

from __future__ import annotations

import argparse
import json
import sys

from flashpatch import registry
from flashpatch.verify.job import collect, prometheus, source

HELP = "a job's state in Prometheus's text format"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "run", "ledger", "metrics")


def run(args: argparse.Namespace) -> int:
    """Write the metrics, or with ``--json`` what they are made of; return 0."""
    found = source.load(source.found(args))
    job = collect.job(found, registry.patches())
    text = json.dumps(job, indent=2) + "\n" if args.json else prometheus.text(found, job)
    if args.output is None:
        sys.stdout.write(text)
    else:
        source.save(args.output, text)
    return 0
