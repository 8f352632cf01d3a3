"""What ``flashpatch-verify grpo`` says here, and what its two ranks saw: run once for the tests that look at either."""

import contextlib
import functools
import io
import json
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpo_lab
import warm_ranks

from flashpatch.verify import cli, run


@dataclass(frozen=True)
class Said:
    """The command's exit status, its report on the family, and what each rank saw."""

    code: int
    family: dict[str, Any]
    seen: list[dict[str, Any]]


@functools.cache
def said() -> Said:
    """Run the command in this process; its ranks fork from a warm interpreter."""
    with tempfile.TemporaryDirectory() as name, warm_ranks.used() as patch:
        patch.setattr("os.environ", grpo_lab.environment(Path(name)))
        patch.setattr(tempfile, "tempdir", name)
        patch.setattr(
            run, "shutil", types.SimpleNamespace(rmtree=lambda path: None)
        )  # what ranks saw is read below
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = cli.main(["grpo", "--json"])
        (family,) = json.loads(out.getvalue())["families"]
        (workdir,) = Path(name).glob("flashpatch-verify-*")
        ranks = sorted(workdir.glob("rank-*.json"))
        return Said(code, family, [json.loads(file.read_text()) for file in ranks])
