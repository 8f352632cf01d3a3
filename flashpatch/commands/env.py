"""Run ``flashpatch env``: print FlashPatch's variables, and where each setting in force comes from."""

from __future__ import annotations

import argparse
from typing import Any

from flashpatch.commands import original_env
from flashpatch.commands.provenance import PRECEDENCE, in_force
from flashpatch.commands.report import Table, emit
from flashpatch.ledger import events, old_runs
from flashpatch.settings.config_file import DEFAULT_FILE

HELP = "our variables, what they mean, and where each setting in force comes from"
MEANINGS = {
    "FLASHPATCH": "names to switch on, comma separated; 1: those of the config, else fp8; unset or 0: none",
    "FLASHPATCH_CONFIG": f"TOML file with names and options; unset: ./{DEFAULT_FILE} if there is one",
    "FLASHPATCH_STRICT": "1: a patch that cannot be armed is an error where it is first needed",
    "FLASHPATCH_LEDGER": "directory where processes report; unset: in the user's cache directory",
    "FLASHPATCH_LEDGER_RAY": "0: what this node's processes report stays on the node, though Ray connects it to others",
    "FLASHPATCH_JOB_LEDGER": "ledger of the process that started the job; set for its Ray workers, which write there if "
    "they can and FLASHPATCH_LEDGER names no other",
    "FLASHPATCH_KEEP_DAYS": f"days after which a run leaves the ledger; 0: no limit; unset: {old_runs.DEFAULT_DAYS:g}",
    "FLASHPATCH_KEEP_RUNS": f"runs that the ledger keeps; 0: no limit; unset: {old_runs.DEFAULT_RUNS}",
    "FLASHPATCH_EVENT_BYTES": f"bytes of timed events that a process keeps; 0: none; unset: {events.DEFAULT_BYTES}",
    "FLASHPATCH_CACHE": "directory for verdicts of contract checks; 0: check in every process; unset: in the "
    "user's cache directory",
    "FLASHPATCH_LOG": "level of the logger flashpatch, which then writes to standard error too",
    "FLASHPATCH_RUN": "id of the run; set by its first process for the others",
    "FLASHPATCH_RESOLVED": "what the first process resolved; set by it for the others",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: ``--json`` is common to all commands."""


def run(args: argparse.Namespace) -> int:
    """Print the settings and return 0; invalid settings raise PatchError."""
    values = original_env.variables()
    settings = in_force()
    data = {
        "variables": [{"name": n, "value": values.get(n), "meaning": text} for n, text in MEANINGS.items()],
        "settings": [setting._asdict() for setting in settings],
        "precedence": list(PRECEDENCE),
    }
    variables = [(name, values.get(name, "unset"), text) for name, text in MEANINGS.items()]
    rows = [(setting.name, _text(setting.value), setting.source) for setting in settings]
    tables = [
        Table("Variables", ("variable", "value", "meaning"), variables),
        Table("In force", ("setting", "value", "source"), rows),
        Table("Precedence", ("the first that says so",), [(line,) for line in PRECEDENCE]),
    ]
    emit(data, tables, args.json)
    return 0


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
