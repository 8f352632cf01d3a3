"""Fork the processes of a probe from one that has imported the frameworks, in place of new interpreters: see `warm`."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import warm

from flashpatch.verify.probes import jobs


@contextlib.contextmanager
def used(modules: Sequence[str] = warm.VERL_VLLM) -> Iterator[pytest.MonkeyPatch]:
    """Within it `flashpatch.verify.probes.jobs.run` forks; yields what else may be replaced for that time."""

    def start(command: jobs.Command, workdir: Path) -> warm.Process:
        with (workdir / f"{command.name}.log").open("wb") as log, open(os.devnull) as nothing:
            descriptors = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
            env = jobs._environment(command)
            return warm.start(modules, command.arguments, env=env, cwd=workdir, descriptors=descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "_start", start)
        yield patch
