"""A process that writes a row exits as it would without: same status, same words on standard error."""

import os
import subprocess
import sys

import pytest

EXITS = {
    "an exit again": "try: sys.exit(0)\nexcept SystemExit as done: sys.exit(done)",
    "an exit made by hand": "sys.exit(SystemExit(3))",
    "a tuple": "sys.exit((3,))",
    "words": "sys.exit('no policy')",
    "a thread": "one = threading.Thread(target=sys.exit, args=(3,)); one.start(); one.join()",
    "its class": "try: sys.exit(4)\nexcept SystemExit as done: assert type(done) is SystemExit and done.code == 4",
    "another process": "assert pickle.dumps(sys.exit).count(b'flashpatch') == 0",
    "a status in one": "try: sys.exit(4)\nexcept SystemExit as done: assert b'flashpatch' not in pickle.dumps(done)",
}


@pytest.mark.parametrize("how", EXITS)
def test_a_process_ends_as_without_a_row(how: str, tmp_path) -> None:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    env = {**clean, "FLASHPATCH_LEDGER": str(tmp_path / "ledger")}
    with_row, without = (
        subprocess.run([sys.executable, "-c", begin + EXITS[how]], env=env, capture_output=True, text=True)
        for begin in (
            "import pickle, sys, threading\nfrom flashpatch import ledger\nledger.boot()\n",
            "import pickle, sys, threading\n",
        )
    )
    assert (with_row.returncode, with_row.stderr) == (without.returncode, without.stderr)
    assert list((tmp_path / "ledger").rglob("*.json"))
