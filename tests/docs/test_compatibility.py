"""The page that says in which version of a framework each patch's contract holds."""

import sys

from toy_sources import DRIFTED, HOLDS, PATCH, wheel
from tree import TREE

from flashpatch.verify.against import survey

sys.path.insert(0, str(TREE / "docs" / "site"))
import compatibility
from compatibility import main, page


def test_the_page(tmp_path):
    paths = [wheel(tmp_path, version, HOLDS) for version in ("1.9", "1.0", "0.9")]
    text = page(survey([wheel(tmp_path, "1.10", DRIFTED), *paths], [PATCH]).cells)
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


def test_the_row_of_one_patch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compatibility.registry, "patches", lambda: {PATCH.id: PATCH, "other": PATCH})
    paths = [wheel(tmp_path, "1.0", HOLDS), wheel(tmp_path, "1.9", DRIFTED)]
    assert main(["--only", PATCH.id, *map(str, paths)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"| `{PATCH.id}` | tested | drifted |"
