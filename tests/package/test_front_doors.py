"""The ways a process starts FlashPatch, and that none of them does anything unless asked."""

from pathlib import Path

import pytest

TREE = Path(__file__).parents[2]
GROUPS = ("vllm.general_plugins", "sglang.srt.plugins", "verl.plugins")
OURS = "import sys; print(sorted(name for name in sys.modules if name.partition('.')[0] == 'flashpatch'))"
HOOKS = "print([finder for finder in sys.meta_path if type(finder).__module__ == 'flashpatch.pth'])"
STARTED = "import sys; print('flashpatch.bootstrap' in sys.modules)"


@pytest.mark.parametrize("kind", ["installed", "editable"])
@pytest.mark.parametrize("env", [{}, {"FLASHPATCH": ""}, {"FLASHPATCH": "0"}])
def test_off_means_nothing_of_ours_is_imported(kind: str, env: dict[str, str], request) -> None:
    assert request.getfixturevalue(kind).python(OURS, **env) == "[]"


@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_the_pth_starts_flashpatch(kind: str, request) -> None:
    assert request.getfixturevalue(kind).python(STARTED, FLASHPATCH="fp8") == "True"


def test_the_pth_waits_for_paths_that_later_files_add(wheel: Path, new_environment) -> None:
    """Our dependencies may come from a directory that a later ``.pth`` adds."""
    environment = new_environment()
    environment.pip("install", "--no-deps", wheel)
    (environment.site / "lent.pth").rename(environment.site / "zzz.pth")
    code = f"import sys; print('packaging' in sys.modules); {HOOKS}"
    done = environment.run("python", "-c", code, FLASHPATCH="1", FLASHPATCH_LOG="LOUD")
    assert "LOUD" in done.stderr, "which the engine says, at the start"
    assert done.stdout.splitlines() == ["True", "[]"]


def test_every_door_leads_to_one_function(installed) -> None:
    lines = (TREE / "flashpatch.start").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["flashpatch.bootstrap:start"]
    code = f"""
from importlib.metadata import entry_points
for group in {GROUPS}:
    print([(point.value, callable(point.load())) for point in entry_points(group=group, name="flashpatch")])
"""
    assert installed.python(code).splitlines() == ["[('flashpatch.bootstrap:start', True)]"] * 3
