"""Our part in Ray's runtime environment: additive, and gone without a trace."""

from __future__ import annotations

import os

import pytest

from flashpatch import forward


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in (*forward.VARIABLES, forward.VLLM_LIST, forward.RAY_HOOK):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what export() sets
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_our_variables_join_those_of_the_job(tmp_path):
    forward.export("cpu,fp8", "{}")
    given = {"env_vars": {"MINE": "1"}, "working_dir": None}
    merged = forward.ray_runtime_env(given)
    assert merged["working_dir"] is None and merged["env_vars"]["MINE"] == "1"
    assert merged["env_vars"]["FLASHPATCH"] == "cpu,fp8" and merged["env_vars"]["FLASHPATCH_RESOLVED"] == "{}"
    assert merged["env_vars"]["FLASHPATCH_LEDGER"] == str(tmp_path / "flashpatch" / "ledger")
    assert given == {"env_vars": {"MINE": "1"}, "working_dir": None}


def test_what_the_job_says_itself_wins():
    forward.export("cpu", "{}")
    assert forward.ray_runtime_env({"env_vars": {"FLASHPATCH": "0"}})["env_vars"]["FLASHPATCH"] == "0"


def test_a_hook_that_was_there_stays_and_is_reported(monkeypatch, caplog):
    monkeypatch.setenv(forward.RAY_HOOK, "somebody.theirs")
    forward.export("cpu", "{}")
    assert os.environ[forward.RAY_HOOK] == "somebody.theirs" and forward.OUR_HOOK in caplog.text
    forward.withdraw()
    assert os.environ[forward.RAY_HOOK] == "somebody.theirs"


def test_withdrawn_it_is_gone():
    forward.export("cpu", "{}")
    assert os.environ[forward.RAY_HOOK] == forward.OUR_HOOK
    forward.withdraw()
    assert forward.RAY_HOOK not in os.environ and forward.ray_runtime_env(None) is None
    assert forward.ray_runtime_env({"pip": []}) == {"pip": []}
