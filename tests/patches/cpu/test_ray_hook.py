"""Our part in Ray's runtime environment: additive, and gone without a trace."""

import os

import pytest

from flashpatch.settings import child_env


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in (*child_env.VARIABLES, child_env.VLLM_LIST, child_env.RAY_HOOK):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what export() sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_our_variables_join_those_of_the_job_which_win(tmp_path):
    child_env.export("cpu,fp8", "{}")
    given = {"env_vars": {"MINE": "1"}, "working_dir": None}
    merged = child_env.ray_runtime_env(given)
    assert merged["working_dir"] is None and merged["env_vars"]["MINE"] == "1"
    assert merged["env_vars"]["FLASHPATCH"] == "cpu,fp8" and merged["env_vars"]["FLASHPATCH_RESOLVED"] == "{}"
    assert merged["env_vars"]["FLASHPATCH_JOB_LEDGER"] == str(tmp_path / "flashpatch" / "ledger")
    assert "FLASHPATCH_LEDGER" not in merged["env_vars"], "a node may name its own"
    assert given == {"env_vars": {"MINE": "1"}, "working_dir": None}
    child_env.export("cpu", "{}")
    assert child_env.ray_runtime_env({"env_vars": {"FLASHPATCH": "0"}})["env_vars"]["FLASHPATCH"] == "0"


def test_a_hook_that_was_there_stays_and_is_reported(monkeypatch, caplog):
    monkeypatch.setenv(child_env.RAY_HOOK, "somebody.theirs")
    child_env.export("cpu", "{}")
    assert os.environ[child_env.RAY_HOOK] == "somebody.theirs" and child_env.OUR_HOOK in caplog.text
    child_env.withdraw()
    assert os.environ[child_env.RAY_HOOK] == "somebody.theirs"


def test_withdrawn_it_is_gone():
    child_env.export("cpu", "{}")
    assert os.environ[child_env.RAY_HOOK] == child_env.OUR_HOOK
    child_env.withdraw()
    assert child_env.RAY_HOOK not in os.environ and child_env.ray_runtime_env(None) is None
    assert child_env.ray_runtime_env({"pip": []}) == {"pip": []}
