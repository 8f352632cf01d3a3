"""Who publishes on a node, and what a job notices when nobody can: one warning."""

import os
import socket
import subprocess
import sys

import pytest
from machine import limit, until

from flashpatch.ledger import files
from flashpatch.ledger.nodes import agent, keys, ray_store

NODE = "ab" * 28


@pytest.fixture
def run(monkeypatch, tmp_path) -> str:
    """A run directory with this process's row in it."""
    monkeypatch.setenv("FLASHPATCH_LEDGER", str(tmp_path))
    monkeypatch.setenv("FLASHPATCH_RUN", "r")
    files.write(files.row_path(), files.row({}))
    return os.path.dirname(files.row_path())


HOLD = """
import sys
from flashpatch.ledger.nodes import agent
one = agent.Agent()
print(one._elected(*sys.argv[1:]), flush=True)
input()
"""


def test_one_process_of_a_directory_and_node_publishes(run) -> None:
    def other(node: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", HOLD, run, node], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    first = other(NODE)
    assert first.stdout.readline() == "True\n"
    mine = agent.Agent()
    assert not mine._elected(run, NODE)
    assert agent.Agent()._elected(run, "cd" * 28), "another node that shares the directory has its own"
    first.kill()
    first.communicate()
    assert mine._elected(run, NODE) and mine._elected(run, NODE)
    late = other(NODE)
    assert late.stdout.readline() == "False\n"
    late.communicate("\n")
    mine._unlock()


def test_without_a_run_directory_or_a_connection_nobody_is_elected(tmp_path, run) -> None:
    assert not agent.Agent()._elected(str(tmp_path / "absent"), NODE)
    one = agent.Agent()
    one._turn()
    assert not any(name.startswith(agent.LOCK) for name in os.listdir(run))


def test_a_store_that_does_not_answer_is_one_warning(run, monkeypatch, caplog) -> None:
    with socket.socket() as nobody:  # bound and not listening
        nobody.bind(("127.0.0.1", 0))
        where = ray_store.Connection(f"127.0.0.1:{nobody.getsockname()[1]}", NODE, False)
        asked = []
        monkeypatch.setattr(agent, "_PERIOD", 0.01)
        monkeypatch.setattr(agent, "_ASK", 0.01)
        monkeypatch.setattr(ray_store, "connection", lambda: asked.append(1) or where)
        one = agent.Agent()
        one.start()
        until(lambda: len(asked) >= 4)  # it tries again
        monkeypatch.setattr(ray_store, "connection", lambda: None)
    [record] = caplog.records
    assert "is not gathered through Ray for now" in record.message and run in record.message
    assert "FLASHPATCH_LEDGER_RAY=0" in record.message


FORKED = """
import os, sys, types
worker = types.SimpleNamespace(connected={connected}, mode=0, node=types.SimpleNamespace(gcs_address="127.0.0.1:1", node_id="{node}"))
sys.modules["ray"] = types.SimpleNamespace(SCRIPT_MODE=0, __version__="0")
sys.modules["ray._private.worker"] = types.SimpleNamespace(global_worker=worker)
import threading, time
from flashpatch.ledger.nodes import agent
turned = threading.Event()
class Seen(agent.Agent):
    def _turn(self):
        try:
            return super()._turn()
        finally:
            turned.set()
agent.Agent = Seen
agent.start()
turned.wait()
child = os.fork()
if not child:
    print([t.name for t in threading.enumerate() if t.name == "flashpatch-nodes"], flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.parametrize("connected, there", [(False, True), (True, False)])
def test_a_forked_child_watches_unless_its_parent_was_connected(run, connected, there) -> None:
    """Ray's state is copied into a child, its connection is not."""
    code = FORKED.format(connected=connected, node=NODE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit(60))
    assert done.stdout == (str(["flashpatch-nodes"]) if there else "[]") + "\n", done.stderr


def test_names_from_the_store_are_checked() -> None:
    assert keys.is_plain("row-h-1-2.json") and keys.FILE.fullmatch("row-h-1-2.json")
    for name in ("", "..", ".hidden", "a/b", "a\0b", "a\nb"):
        assert not keys.is_plain(name)
    with pytest.raises(ValueError, match="more than"):
        keys.unpacked(keys.packed("x" * 100), 50)
    with pytest.raises(ValueError):
        keys.unpacked(keys.packed("x" * 100)[:-4], 500)
