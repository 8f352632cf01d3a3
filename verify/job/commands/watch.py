"""Run ``flashpatch watch``: show a job in the terminal while it runs."""

from __future__ import annotations

import argparse
import json
import sys
import time

from flashpatch.commands.report import drawn, emit
from flashpatch.errors import PatchError
from flashpatch.verify import ends
from flashpatch.verify.job import collect, screen, source

HELP = "show a job in the terminal while it runs"


def arguments(parser: argparse.ArgumentParser) -> None:
    source.add(parser, "run", "ledger", "watch")


def run(args: argparse.Namespace) -> int:
    """Show the run until no process of it is alive, or its Ray cluster has gone, or it is interrupted; return 0.

    Where standard output is no terminal, and with ``--once``, it is shown once; with ``--json`` as JSON."""
    if not args.every > 0:
        raise PatchError(f"--every {args.every:g} is not above 0.", advice="Name seconds, such as --every 2.")
    folder = source.found(args)
    found = collect.read(folder)
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    if args.once or not sys.stdout.isatty():
        emit(None, screen.view(found, height=60), False)
        return 0
    from rich.console import Console, Group
    from rich.live import Live

    console, lost = Console(), ""

    def view() -> Group:
        return Group(*(drawn(table, cut=True) for table in screen.view(found, console.height)))

    try:
        with Live(view(), console=console, screen=True, auto_refresh=False) as live:
            while found["how"] in (ends.RUNNING, ends.LOST):
                time.sleep(args.every)
                try:
                    source.renew(args, folder)
                except PatchError as error:  # the cluster has ended: its nodes will not say more
                    lost = str(error)
                    break
                found = collect.read(folder)
                live.update(view(), refresh=True)
    except KeyboardInterrupt:
        pass
    console.print(view())
    if lost:
        print(lost, file=sys.stderr)
    return 0
