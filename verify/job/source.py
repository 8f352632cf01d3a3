"""Find one run in a ledger."""

from __future__ import annotations

import argparse
import sys
import tomllib
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any

from flashpatch.commands import provenance
from flashpatch.errors import PatchError
from flashpatch.ledger import files, runs
from flashpatch.ledger.nodes import node, published, ray_store
from flashpatch.patches._shared.atomic_file import replacing


class NoRun(PatchError):
    """Say that there is no run to show, and why."""


def no_run(where: Path) -> NoRun:
    """Return the error that the ledger ``where`` has no run to show."""
    return NoRun(
        f"there is no run in {where}: no process with FLASHPATCH set has reported there.",
        advice="Put FLASHPATCH=fp8 in front of a job whose Python has FlashPatch. Another user, container or host: --ledger DIR.",
    )


def add(parser: Any, *tables: str) -> None:
    """Add the arguments of tables of ``options.toml`` to a parser, or to a group of it."""
    types, folder = {"int": int, "float": float, "path": Path}, resources.files("flashpatch.verify")
    known = tomllib.loads((folder / "options.toml").read_text())
    for names, given in (one for table in tables for one in known[table].items()):
        kind = {"type": types[given["type"]]} if "type" in given else {}
        parser.add_argument(*names.split(", "), **{**given, **kind})


def save(path: Path, text: str) -> None:
    """Write a file, a regular one atomically; raise PatchError if it cannot be written."""
    is_special = path.exists() and not path.is_file()  # as /dev/stdout is
    try:
        with nullcontext(path) if is_special else replacing(path, private=False) as opened:
            opened.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PatchError(f"{path}: {error.strerror}", advice="Name another file by -o.") from None


def written(args: argparse.Namespace, text: str, name: str = "") -> int:
    """Write a text to the file of ``-o``, else ``name``; without either, or for ``-``, print it. With ``name`` print the path. Return 0."""
    output = str(args.output or name)
    if output in ("", "-"):
        sys.stdout.write(text)
        return 0
    save(Path(output), text)
    if name:
        print(output)
    return 0


def found(args: argparse.Namespace) -> Path:
    """Return the directory of the run that the arguments name, brought up to date if they name a Ray cluster.

    A run that is named and not there is a usage error.

    Raises NoRun if there is none at all, and PatchError if the cluster cannot be reached."""
    where, args.run_id = ledger(args), args.run_id or getattr(args, "named", None)
    if args.ray is not None:
        folder = where / _published(args)
        renew(args, folder)
        return folder
    if args.run_id and ("/" in args.run_id or args.run_id in (".", "..")):
        folder = Path(args.run_id).resolve()
        if folder.is_dir():
            return folder
        args.usage_error(f"there is no directory {folder}. Name a run's directory, or its id.")
    try:
        newest = runs.choose(where, args.run_id)
    except PatchError as error:
        args.usage_error(f"{error.problem} {error.advice}")
        raise
    if newest is None:
        raise no_run(where)
    return newest


def ledger(args: argparse.Namespace) -> Path:
    """Return the ledger that the arguments name, else the user's."""
    with provenance.environment():
        return args.ledger or files.directory()


def renew(args: argparse.Namespace, folder: Path) -> None:
    """Copy into the directory that `chosen` returned what is new, if the arguments name a Ray cluster; raise PatchError if that
    is gone, or the directory cannot be written."""
    if args.ray is None:
        return
    try:
        node.fetch(args.store, folder.name, folder)
    except ray_store.StoreError as error:
        raise _unreachable(error) from error
    except OSError as error:
        raise PatchError(f"{folder} cannot be written: {error}", advice="Name another ledger.") from None


def _published(args: argparse.Namespace) -> str:
    """Return the run that the arguments name, or the one that was published last on their Ray cluster, whose store they keep.

    Raises NoRun, with the newest ones, if the cluster has no such run, and PatchError if it cannot be reached."""
    try:
        args.store = ray_store.Store(ray_store.address(args.ray))
        found = published.run_ids(args.store)
    except ray_store.StoreError as error:
        raise _unreachable(error) from error
    if found and args.run_id in (None, *found):
        return args.run_id or found[-1]
    wanted, newest = f"run {args.run_id!r}" if args.run_id else "run", ", ".join(found[:-6:-1]) or "none"
    where = f"the Ray cluster at {args.store.address}"
    raise NoRun(f"no {wanted} is published on {where}.", advice=f"The newest are: {newest}.")


def _unreachable(error: Exception) -> PatchError:
    return PatchError(
        f"the ledger cannot be read from Ray: {error}.",
        advice="Name the cluster's address, HOST:PORT, after --ray, or leave --ray out to read the ledger here.",
    )
