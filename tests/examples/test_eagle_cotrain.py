"""`examples/eagle_cotrain.py` from its beginning to its pictures, in its quick form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tree import TREE

pytestmark = [pytest.mark.vllm, pytest.mark.full]


def test_the_quick_form_ends_with_three_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(TREE / "examples" / "eagle_cotrain.py"), "--quick", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + "".join(
        log.read_text()[-4000:] for log in tmp_path.glob("*.log")
    )
    for name in ("acceptance", "arms", "speed"):
        assert (tmp_path / f"eagle_{name}.png").exists()
    rates = json.loads((tmp_path / "eagle_speed.json").read_text())["rates"]
    assert list(rates) == ["1", "4", "16", "32"]
    for arms in rates.values():
        assert len(arms) == 6 and all(len(turns) == 1 and turns[0] > 0 for turns in arms.values())
    lengths = json.loads((tmp_path / "eagle_acceptance.json").read_text())["length"]
    assert [number for number, _ in lengths["co-trained"]] == [-2, -1, 0, 1, 2, 3]
    assert lengths["co-trained"][-1][1] > lengths["co-trained"][0][1]  # it learned
    assert "0 of 318 greedy answers unlike those without speculation" in done.stdout
