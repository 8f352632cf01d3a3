"""The page that says in which version of a framework each patch's contract holds."""

import sys

import pytest
from toy_sources import DRIFTED, HOLDS, PATCH, wheel
from tree import TREE

from flashpatch.verify.against import survey

sys.path.insert(0, str(TREE / "docs" / "site"))
import compatibility
from compatibility import main, page

SOURCES = {"1.10": DRIFTED, "1.9": HOLDS, "1.0": HOLDS, "0.9": HOLDS}


def test_the_page(tmp_path):
    report = survey([wheel(tmp_path, version, text) for version, text in SOURCES.items()], [PATCH])
    text = page(report.cells)
    assert "| patch | 0.9 | 1.0 | 1.9 | 1.10 |" in text
    assert "| `fam.toyfw.load` | – | tested | holds | drifted |" in text
    assert "- `fam.toyfw.load` on 1.10: toyfw.engine:Engine.load no longer takes 'weights'" in text


def test_the_compatibility_page_explains_itself_and_names_a_path_that_is_not_there(capsys):
    assert main(["--help"]) == 0
    assert "PATH" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["/nowhere/vllm.whl"]) == 2
    assert "there is no /nowhere/vllm.whl" in capsys.readouterr().err
    assert main(["--only", "fp8.verl.nothing", "/"]) == 2
    assert "there is no patch fp8.verl.nothing" in capsys.readouterr().err


def test_versions_are_written_into_a_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compatibility.registry, "patches", lambda: {PATCH.id: PATCH})
    wheels = {version: str(wheel(tmp_path, version, text)) for version, text in SOURCES.items()}
    main([wheels["0.9"], wheels["1.10"]])
    (into := tmp_path / "page.md").write_text(capsys.readouterr().out)
    assert main(["--into", str(into), wheels["1.0"], wheels["1.9"], wheels["1.10"]]) == 0
    assert main([*wheels.values()]) == 0
    assert into.read_text() == capsys.readouterr().out
    into.write_text(into.read_text().replace(PATCH.id, "other"))
    with pytest.raises(ValueError, match=f"the page has no row of {PATCH.id} under toyfw"):
        main(["--into", str(into), wheels["1.0"]])


def test_the_row_of_one_patch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compatibility.registry, "patches", lambda: {PATCH.id: PATCH, "other": PATCH})
    paths = [wheel(tmp_path, "1.0", HOLDS), wheel(tmp_path, "1.9", DRIFTED)]
    assert main(["--only", PATCH.id, *map(str, paths)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"| `{PATCH.id}` | tested | drifted |"
