"""``flashpatch profile`` as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import warm
from machine import limit

from flashpatch.patches.fp8.calibration import profile_file

MAIN = "import sys; from flashpatch.cli import main; sys.exit(main())"


def run(*args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "NO_COLOR": "1", **env}
    return warm.run(warm.MODELS, ["-c", MAIN, "profile", *args], env=environ, cwd=cwd, timeout=limit(300))


def test_a_pair(pairs, tmp_path: Path) -> None:
    model, other, _ = pairs("qwen2")
    done = run("--model", model, "--quantized", other, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert (data["form"], data["granularity"], len(data["rows"])) == ("int8", "channel", 21)
    assert len(data["exchanges"]) == 12
    assert profile_file.load(tmp_path / "profile.safetensors").form == "int8"
    again = run("--model", model, "--quantized", other, cwd=tmp_path)
    assert again.returncode == 1 and "exists" in again.stderr and "Traceback" not in again.stderr
    shown = run("--show", "profile.safetensors", cwd=tmp_path)
    assert shown.returncode == 0 and "12 times" in shown.stdout


def test_a_pair_that_does_not_match_fails_and_writes_nothing(bf16, pairs, tmp_path: Path) -> None:
    _, other, _ = pairs("qwen2")
    done = run("--model", bf16("llama"), "--quantized", other, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert "model.layers.0.self_attn.q_proj.bias (only in the quantized one)" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    code = f"import sys; sys.modules['torch'] = None; {MAIN}"
    command = [sys.executable, "-c", code, "profile"]
    assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode == 2, "arguments come first"
    pair = ["--model", "x", "--quantized", "y"]
    done = subprocess.run([*command, *pair], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "'flashpatch profile' needs torch, which is not installed" in done.stderr
    help = subprocess.run(
        [sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert help.returncode == 0 and "profile" in help.stdout
