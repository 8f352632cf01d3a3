"""The drift report over several versions, and the command's exit status."""

import json

import pytest
from toy_sources import DRIFTED, HOLDS, PATCH, sdist, wheel

from flashpatch.verify.against import survey


def damaged(tmp_path, kind):
    """A wheel or sdist of which the second half is missing or overwritten."""
    path = sdist(tmp_path, "3.0", HOLDS) if kind == "sdist" else wheel(tmp_path, "3.0", HOLDS)
    whole = path.read_bytes()
    if kind == "flipped":  # the directory at a zip's end stays: only a member's checksum tells
        at = whole.index(b"class Engine")
        path.write_bytes(whole[:at] + b"CLASS" + whole[at + 5 :])
    else:
        path.write_bytes(whole[: len(whole) // 2])
    return path


@pytest.mark.parametrize("first", [HOLDS, DRIFTED])
def test_two_builds_of_a_version_do_not_hide_a_drift(tmp_path, first):
    second = HOLDS if first == DRIFTED else DRIFTED
    paths = [wheel(tmp_path / "a", "1.0", first), wheel(tmp_path / "b", "1.0", second)]
    [drifted] = [cell for cell in survey(paths, [PATCH]).cells if cell.verdict == "drifted"]
    assert drifted.drift == "toyfw.engine:Engine.load no longer takes 'weights' (toyfw/engine.py:3)"


@pytest.mark.parametrize("kind", ["cut", "flipped", "sdist"])
def test_a_damaged_archive_is_named_and_stops_no_other(tmp_path, kind):
    bad = damaged(tmp_path, kind)
    report = survey([bad, wheel(tmp_path, "1.0", HOLDS)], [PATCH])
    assert [cell.of for cell in report.cells] == ["toyfw 1.0"]
    [(path, reason)] = report.unreadable
    assert (path, report.exit_status) == (str(bad), 2) and reason


@pytest.mark.parametrize(
    ("parameter", "unreadable", "options", "code"),
    [("policy", 0, [], 0), ("weights", 0, [], 1), ("policy", 1, [], 2), ("weights", 1, ["--json"], 2)],
)
def test_the_exit_status_and_the_formats(verify, tmp_path, parameter, unreadable, options, code):
    """`verify` brings the family ``toy``, whose contract is about ``policy``."""
    source = "class Engine:\n    def update(self, policy): ...\n    def generate(self): ...\n"
    paths = [wheel(tmp_path, "1.0", source.replace("policy", parameter)), wheel(tmp_path, "1.1", source)]
    absent = [tmp_path / "absent.whl"] * unreadable
    done = verify("toy", "--against", *map(str, [*absent, *paths]), *options)
    assert done.returncode == code
    assert ("absent.whl is neither a wheel" in done.stderr) == bool(unreadable)
    if options:
        found = json.loads(done.stdout)
        assert (found["ok"], len(found["cells"]), len(found["unreadable"])) == (False, 4, unreadable)
    else:
        has_drift = parameter == "weights"
        assert ("drifted(toyfw/engine.py:2)" in done.stdout) == has_drift != ("no drift" in done.stdout)
        counts = (["1", "1"] if has_drift else ["2", "0"], ["2", "0"])
        rows = [line.split()[2:4] for line in done.stdout.splitlines()[-2:]]
        assert rows == [*counts]
