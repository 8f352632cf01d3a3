"""The probe of LoRA adapters, on real engines."""

import json
import os
import subprocess
import sys

import pytest
from machine import limit

COMMAND = "import sys; from flashpatch.verify.cli import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.vllm
def test_on_real_engines(tmp_path):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLASHPATCH")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, "lora", "--json"],
        env={**inherited, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=limit(400),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [part] = json.loads(done.stdout)["families"]
    one, two, three, base, merged, bad, _ = part["proofs"]
    assert part["name"] == "lora" and all(proof["subject"] == "lora" for proof in part["proofs"])
    assert {proof["evidence"] for proof in (one, two, three, base)} == {"largest difference of logprobs 0"}
    assert "off by" in merged["evidence"] and "but the weight is" in bad["evidence"]
    assert not list(tmp_path.glob("flashpatch-verify-*")), "nothing is left behind"
