"""The frame around the processes of all probes says why one failed."""

from pathlib import Path

import pytest

from flashpatch.verify import processes
from flashpatch.verify.probes import jobs


@pytest.mark.slow
def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    ended = jobs.run([jobs.job("fp8.job:nothing", tmp_path)], tmp_path, 100)
    assert "has no attribute 'nothing'" in ended.problem
    assert ended.problems == {"job": ended.problem} and ended.seen == {"job": {"failed": ended.problem}}


def test_a_fresh_job_has_no_flashpatch_and_may_fail_alone(tmp_path: Path) -> None:
    job, fresh = (jobs.job("fp8.job:updates", tmp_path, name) for name in ("job", jobs.FRESH))
    assert (job.stock, job.stops_others, fresh.stock, fresh.stops_others) == (False, True, True, False)


def test_what_a_job_has_done_is_told_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job waits for what is made when its line is heard."""
    code = (
        "import sys; from pathlib import Path; from flashpatch.verify.probes import jobs;"
        "here = Path(sys.argv[1]); jobs.tell(here, 'an engine is open');"
        "jobs.wait_for(here / 'heard'); jobs.tell(here, 'the last')"
    )
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        (tmp_path / "heard").touch()

    monkeypatch.setattr(jobs, "hear", hear)
    ended = jobs.run([processes.Command("job", ["-c", code, str(tmp_path)])], tmp_path, 100)
    assert not ended.problem and lines == ["an engine is open", "the last"]
