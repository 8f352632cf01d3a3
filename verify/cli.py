"""Run ``flashpatch-verify``: exit 0 when all that is required is live, 1 when not, 2 on wrong use.

With ``--against``: 0 when every contract holds, 1 when one drifted, 2 when a path cannot be read, 3 when one holds nothing of it."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashpatch import __version__, registry
from flashpatch.commands.report import Table, counted, emit, reader_left
from flashpatch.errors import PatchError
from flashpatch.ledger import files, runs
from flashpatch.patch_status import absent_frameworks
from flashpatch.verify import ends, live
from flashpatch.verify.job import screen, source
from flashpatch.verify.policy_versions import splits

if TYPE_CHECKING:
    from flashpatch.verify.run import FamilyReport

OK, NOT_LIVE, USAGE = 0, 1, 2
_BETWEEN_LOOKS = 5.0  # seconds, for the ranks of an engine to commit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # which would leave engines running
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if given[:1] == ["exact"]:
        from flashpatch.verify.exact import command

        return command.main(given[1:])
    if given[:1] == ["eagle"] and any(one.startswith("--drafter") for one in given):
        from flashpatch.patches.eagle.vllm import before_a_job

        return before_a_job.main(given[1:])
    parser = _parser()
    options = parser.parse_args(given)
    try:
        if options.against:
            return _against(options)
        if options.ray is not None and options.live is None:
            raise ValueError("--ray goes with --live")
        if options.live is not None or options.run_id is not None or options.ledger is not None:
            return _live(options)
        return _probes(options)
    except BrokenPipeError:
        return reader_left()
    except (PatchError, LookupError, ValueError) as error:
        print(f"flashpatch-verify: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashpatch-verify",
        description="Prove by observed behaviour that patches are live.",
        epilog="exact MODEL compares an engine with the trainer's model: see exact --help. eagle --drafter D --model M tells what a drafter brings: see eagle --drafter D --help. Exit status: 0 every required patch is live, 1 some are not or nothing is installed, 2 wrong use. With --against: 0 no drift, "
        "1 drift, 2 wrong use or a path that cannot be read, 3 a path that holds nothing of what is patched.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    source.add(parser.add_mutually_exclusive_group(), "mode")
    source.add(parser, "ledger", "verify")
    parser.set_defaults(usage_error=parser.error)
    return parser


def _probes(options: argparse.Namespace) -> int:
    from flashpatch.verify import run

    selections = run.selected(options.names)
    if not selections:
        raise ValueError("nothing is switched on: set FLASHPATCH or name a family (see flashpatch list)")
    reports = [
        run.verify(one, lambda line: print(line, file=sys.stderr, flush=True), part)
        for one, part in selections
    ]
    proven = [report.ok for report in reports if options.names or report.ok is not None]
    ok = bool(proven) and all(proven)
    proofs = [
        (proof.subject, proof.what, "yes" if proof.ok else "failed", proof.evidence, f"{proof.seconds:.1f}")
        for report in reports
        for proof in report.proofs
    ]
    tables = [Table("Observed", ("about", "behaviour", "seen", "evidence", "seconds"), proofs, "nothing")]
    if options.all:
        rows = [_patch(one) for report in reports for one in report.patches]
        tables.insert(0, Table("Patches", ("patch", "states", "evidence", "tested"), rows))
    notes = absent_frameworks(id for report in reports for id in report.absent)
    notes += [text for report in reports for what, text in report.about if what == "versions"]
    notes += [] if options.all else ["--all shows every patch"]
    columns = ("name", "observed", "patches at work", "verdict")
    tables.append(Table("Verdict", columns, list(map(_verdict, reports)), notes=notes))
    emit({"ok": ok, "families": [asdict(report) for report in reports]}, tables, options.json)
    for report in reports:
        if report.workdir:
            print(f"{report.name}: logs and files of the probe are in {report.workdir}", file=sys.stderr)
    return OK if ok else NOT_LIVE


def _verdict(report: FamilyReport) -> tuple[str, str, str, str]:
    """Return the row of one name."""
    if report.ok is None:
        return report.name, "-", "-", "nothing that it patches is installed"
    seen, called = sum(proof.ok for proof in report.proofs), sum(one["calls"] > 0 for one in report.patches)
    verdict = "proven" if report.ok else "NOT proven"
    return report.name, f"{seen} of {len(report.proofs)}", str(called), verdict


def _patch(one: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return the row of a patch, of what `collect.of_patches` says of it."""
    seen = f"{one['calls']} calls in {counted(one['processes'], 'process', 'processes')}"
    states = ", ".join(f"{word} in {count}" for word, count in one["states"].items())
    return (
        one["id"],
        states,
        seen if one["calls"] else f"due {one['due']}",
        "yes" if one["tested"] else "untested",
    )


def _live(options: argparse.Namespace) -> int:
    if options.live:
        is_name = options.ledger or options.live in registry.names()
        if not is_name and (os.sep in options.live or Path(options.live).is_dir()):
            options.ledger = Path(options.live)
        else:
            options.names = [options.live, *options.names]
    if options.ledger and not options.ledger.is_dir():
        raise ValueError(f"there is no directory {options.ledger}")
    options.ledger = options.ledger or files.directory()
    required = {registry.family_of(name).name: name for name in options.names}
    gc.disable()  # a large job is many objects, none of them in a cycle
    try:
        chosen = _at_rest(source.found(options), options)
    except source.NoRun as error:
        print(error, file=sys.stderr)
        return NOT_LIVE
    report = live.judge(chosen, registry.patches(), required)
    rows, notes = [name.cells() for name in report.names], _about(report, chosen, options.all)
    # The newest that there is may not be the one that was meant.
    began, command = min(((row.first_written, row.argv0) for row in chosen.rows), default=(0.0, ""))
    at = f"{time.strftime('%b %d %H:%M', time.localtime(began))}, {screen.span(time.time() - began)} ago"
    title = f"Run {chosen.id}" + (f": {Path(command).name or 'python'}, began {at}" if began else "")
    tables = [Table(title, live.COLUMNS, rows, notes=notes)]
    if report.stated:
        said = [(report.typed[one.family], one.what, one.seen or live.NOT_SEEN) for one in report.stated]
        remarks = [text for _, text in report.remarks]
        tables.append(Table("What each did", ("name", "statement", "seen"), said, notes=remarks))
    if report.lines:
        tables.append(Table(report.verdict.capitalize(), ("problem",), [(line,) for line in report.lines]))
    if options.all:
        tables.append(_processes(report))
    emit(report.as_json(), tables, options.json)
    return OK if report.ok else NOT_LIVE


def _at_rest(folder: Path, options: argparse.Namespace) -> runs.Run:
    """Return a run, read again while it lives and is split into policy versions in another way than before: between the
    commits of two ranks every engine is."""
    before, patches = list[str](), registry.patches()
    while True:
        source.renew(options, folder)
        if (run := runs.read_run(folder)) is None:
            raise source.no_run(folder)
        now = splits(run.rows, patches)
        if now in ([], before) or not any(row.alive for row in run.rows):
            return run
        before = now
        time.sleep(_BETWEEN_LOOKS)


def _about(report: live.LiveReport, run: runs.Run, all: bool) -> list[str]:
    """Return a line on the processes, of a job that is over those on what still lives, and one on the nodes of Ray, if there are some."""
    alive = Counter(one.lives for one in report.processes)
    there = [one for one in report.processes if one.present]
    acted, missing = (
        sum(one.calls > 0 for one in there),
        sum(one.verdict == "missing" for one in report.processes),
    )
    how = "" if report.ended == ends.RUNNING or alive["unknown"] else report.ended or "how, no row says"
    over = f": it has ended ({how})" if how else ""
    said = f"{alive['yes']} of {counted(len(report.processes), 'process', 'processes')} alive{over}; "
    said += f"patches acted in {acted}, {len(there) - acted} called none"
    said += f", {missing} are missing" if missing else ""
    found, is_open = defaultdict[str, list[str]](list), any(row.alive for row in ends.first(run.rows))
    for row in filter(lambda row: row.alive and ends.is_over(report.ended), run.rows):
        # Its front end is there to end it, it says itself that it ends, or another process has told it to.
        closes = is_open or row.ended or row.stopped
        who = ", ".join(filter(None, (*row.roles, row.stopped))) or row.argv0
        found["still closing" if closes else "left behind by this job, still alive"] += [f"{row.pid} ({who})"]
    found["nodes"] += sorted({process.node for process in report.processes if process.node})
    lines = [f"{what}: {', '.join(who)}" for what, who in found.items() if who]
    return [said + ("" if all else " (--all shows each)"), *lines]


def _processes(report: live.LiveReport) -> Table:
    rows = []
    for process in report.processes:
        at_work = f"{process.states.get('live', 0)} of {sum(process.states.values())}"
        told = process.how, at_work, str(process.calls)
        rows.append((live.called_by(process).replace("+", " + "), *told, process.verdict))
    return Table("Processes", ("process", "ended", "patches live", "calls", "verdict"), rows)


def _against(options: argparse.Namespace) -> int:
    from flashpatch.verify.against import survey

    families = {registry.family_of(name).name for name in options.names}
    patches = [patch for patch in registry.patches().values() if not families or patch.family in families]
    if not patches:
        raise ValueError("there is no patch to check")
    report = survey(options.against, patches)
    for path, reason in (*report.unreadable, *report.empty):
        print(f"flashpatch-verify: {path} {reason}", file=sys.stderr)
    if not (report.cells or options.json):
        return report.exit_status
    drifted_first = sorted(report.cells, key=lambda cell: cell.verdict != "drifted")
    shown = [cell for cell in drifted_first if options.all or cell.verdict == "drifted"]
    rows = [(cell.patch, cell.of, cell.text, cell.drift) for cell in shown]
    found = Table("Contracts", ("patch", "version", "contract", "drift"), rows, "no drift")
    counts = Counter((cell.of, cell.verdict) for cell in report.cells)
    of_each = [
        (of, *(str(counts[of, verdict]) for verdict in ("holds", "drifted", "outside")))
        for of in dict.fromkeys(cell.of for cell in report.cells)
    ]
    versions = Table("Versions", ("version", "hold", "drifted", "for other versions"), of_each)
    emit(report.as_json(), [found, versions], options.json)
    return report.exit_status
