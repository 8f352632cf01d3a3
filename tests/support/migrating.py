"""Run ``flashpatch migrate`` in this process, and load what it printed as a job would."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashpatch import cli
from flashpatch.settings import config_file, selections


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(("FLASHPATCH", "FLASHRL", "SGLANG_PATCH"))]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def migrate(fork: str, *files: str | Path, **variables: str) -> dict[str, Any]:
    """Return what the command says with ``--json``, beside it ``code`` and ``stderr``.

    Args:
        fork: as after ``--from``.
        files: as on the command line.
        variables: of the environment, beside this process's without FlashPatch's and FlashRL's.
    """
    out, err = io.StringIO(), io.StringIO()
    with _environment(**variables), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["migrate", "--json", "--from", fork, *map(str, files)])
    said = json.loads(out.getvalue()) if out.getvalue() else {}
    return {**said, "code": code, "stderr": err.getvalue()}


def loaded(text: str, folder: Path) -> selections.Selection:
    """Return what a job with ``FLASHPATCH=1`` reads from a configuration."""
    file = folder / "migrated.toml"
    file.write_text(text)
    with _environment(FLASHPATCH="1", FLASHPATCH_CONFIG=str(file)):
        config_file.load()
        return selections.from_environment(selections.NOTHING)


def script(folder: Path, text: str, name: str = "run.sh") -> Path:
    """Write a script and return its path."""
    path = folder / name
    path.write_text(text)
    return path
