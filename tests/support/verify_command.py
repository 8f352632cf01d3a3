"""Run ``flashpatch-verify NAME`` in new processes, over FlashPatch as it is or with one text of one file replaced, or here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machine
import warm
import warm_ranks

import flashpatch
import flashpatch.patches
import flashpatch.verify
from flashpatch.verify import cli, run

_COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Said:
    """The command's exit status, its report on the family or part, and all that was said."""

    code: int
    family: dict[str, Any]
    text: str

    @property
    def proofs(self) -> list[dict[str, Any]]:
        return self.family["proofs"]

    @property
    def failed(self) -> set[str]:
        """The behaviours that were not observed."""
        return {proof["what"] for proof in self.proofs if not proof["ok"]}

    def proven(self) -> Said:
        """Return this; fail unless everything is proven."""
        assert self.code == 0 and not self.failed, self.text
        return self


def verify(
    name: str, folder: Path, environment: Mapping[str, str] | None = None, seconds: float = 400, **more: str
) -> Said:
    """Run the command in a folder, by default in this process's environment without FlashPatch's variables."""
    if environment is None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    command = [sys.executable, "-P", "-c", _COMMAND, name, "--json"]
    done = machine.run(command, seconds, env={**environment, "TMPDIR": str(folder), **more}, cwd=folder)
    text = f"exit {done.returncode}\n{done.stdout[-9000:]}\n{done.stderr[-4000:]}"
    assert done.stdout.startswith("{"), text
    [family] = json.loads(done.stdout)["families"]
    return Said(done.returncode, family, text)


def here(
    name: str, folder: Path, environment: Mapping[str, str], modules: Sequence[str] = warm.VERL_VLLM
) -> tuple[Said, Path]:
    """Run the command in this process, what it starts forked from a warm interpreter; return its working directory too, which
    stays."""
    before, out = set(folder.iterdir()), io.StringIO()
    with warm_ranks.used(modules) as patch, contextlib.redirect_stdout(out):
        patch.setattr("os.environ", environment)
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(run, "shutil", SimpleNamespace(rmtree=lambda path: None))
        code = cli.main([name, "--json"])
    [workdir] = set(folder.glob("flashpatch-verify-*")) - before
    [family] = json.loads(out.getvalue())["families"]
    return Said(code, family, out.getvalue()), workdir


def doctored(folder: Path, file: str, text: str, other: str) -> str:
    """Return a directory for PYTHONPATH with FlashPatch in which one text of ``patches/FILE`` is another."""
    site = folder / "site"
    for package in (flashpatch, flashpatch.patches, flashpatch.verify):
        source, target = Path(package.__file__).parent, site.joinpath(*package.__name__.split("."))
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = site / "flashpatch" / "patches" / file
    before = path.read_text()
    assert before.count(text) == 1, f"{file} has changed: write this sabotage anew"
    path.write_text(before.replace(text, other))
    return str(site)
