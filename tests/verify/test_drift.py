"""The drift report over several versions, and the command's exit status."""

import json

import pytest
from toy_sources import DRIFTED, HOLDS, PATCH, sdist, wheel

from flashpatch.verify.drift import escape, survey


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


def test_versions_are_in_order_and_each_drift_names_its_place_and_where_it_holds(tmp_path):
    versions = {"1.10": DRIFTED, "1.9": HOLDS, "1.0": HOLDS, "0.9": HOLDS}
    text = survey([wheel(tmp_path, *pair) for pair in versions.items()], [PATCH]).markdown()
    assert text.startswith("# Contracts on 4 versions: 1 contract drifted\n")
    rows = [line for line in text.splitlines() if line.startswith("| toyfw")]
    assert rows == [
        "| toyfw 0.9 | 0 | 0 | 0 | 1 | no patch is for it |",
        "| toyfw 1.0 | 1 | 0 | 0 | 0 |  |",
        "| toyfw 1.9 | 0 | 1 | 0 | 0 |  |",
        "| toyfw 1.10 | 0 | 0 | 1 | 0 | `fam.toyfw` |",
    ]
    assert (
        "## Drift in toyfw 1.10\n\n- `fam.toyfw.load`: toyfw.engine:Engine.load no longer takes 'weights'"
        in text
    )
    assert "(toyfw/engine.py:3). Holds in 1.0, 1.9.\n" in text
    assert "| `fam.toyfw.load` | – | tested | holds | drifted |" in text


@pytest.mark.parametrize("first", [HOLDS, DRIFTED])
def test_two_builds_of_a_version_do_not_hide_a_drift(tmp_path, first):
    second = HOLDS if first == DRIFTED else DRIFTED
    paths = [wheel(tmp_path / "a", "1.0", first), wheel(tmp_path / "b", "1.0", second)]
    text = survey(paths, [PATCH]).markdown()
    assert "| `fam.toyfw.load` | drifted |" in text


@pytest.mark.parametrize("kind", ["cut", "flipped", "sdist"])
def test_a_damaged_archive_is_named_and_stops_no_other(tmp_path, kind):
    bad = damaged(tmp_path, kind)
    report = survey([bad, wheel(tmp_path, "1.0", HOLDS)], [PATCH])
    assert [cell.of for cell in report.cells] == ["toyfw 1.0"]
    [(path, reason)] = report.unreadable
    assert (path, report.exit_status) == (str(bad), 2) and reason
    text = report.markdown()
    assert text.startswith("# Contracts on 1 version: no drift, 1 path not read\n")
    assert f"## Not read\n\n- `{bad}` " in text


def test_names_do_not_turn_into_markup():
    assert escape("no '__init__' in a[0] | <b>") == r"no '\_\_init\_\_' in a\[0\] \| \<b\>"


@pytest.mark.parametrize(
    ("parameter", "unreadable", "style", "code"),
    [
        ("policy", 0, "text", 0),
        ("weights", 0, "markdown", 1),
        ("policy", 1, "markdown", 2),
        ("weights", 1, "json", 2),
    ],
)
def test_the_exit_status_and_the_formats(verify, tmp_path, parameter, unreadable, style, code):
    """`verify` brings the family ``toy``, whose contract is about ``policy``."""
    source = "class Engine:\n    def update(self, policy): ...\n    def generate(self): ...\n"
    paths = [wheel(tmp_path, "1.0", source.replace("policy", parameter)), wheel(tmp_path, "1.1", source)]
    absent = [tmp_path / "absent.whl"] * unreadable
    done = verify("toy", "--against", *map(str, [*absent, *paths]), "--format", style)
    assert done.returncode == code
    assert ("absent.whl is neither a wheel" in done.stderr) == bool(unreadable)
    if style == "json":
        found = json.loads(done.stdout)
        assert (found["ok"], len(found["cells"]), len(found["unreadable"])) == (False, 4, unreadable)
    elif style == "markdown":
        assert done.stdout.startswith("# Contracts on 2 versions: ")
        assert ("## Drift in toyfw 1.0" in done.stdout) == (parameter == "weights")
    else:
        assert done.stdout.startswith("Contracts\n")


def test_markdown_is_for_contracts_only(verify):
    done = verify("toy", "--format", "markdown")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--format markdown goes with --against" in done.stderr
