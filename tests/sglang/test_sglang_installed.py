"""The records against the installed SGLang, without an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sglang_lab as lab

UNDO = """
import importlib, json
import flashpatch
from flashpatch import engine, registry
from flashpatch.patches.fp8 import FAMILY

def holder(target):
    module, _, name = target.partition(":")
    place = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        place = getattr(place, part)
    return place, last

places = [holder(p.targets[0]) for p in FAMILY.patches if p.framework == "sglang"]
before = [vars(place)[last] for place, last in places]
flashpatch.enable("fp8")
during = [vars(place)[last] for place, last in places]
states = {i: s.state.word for i, s in engine.statuses().items() if i.startswith("fp8.sglang.")}
flashpatch.disable("fp8")
after = [vars(place)[last] for place, last in places]
print(json.dumps(dict(states=sorted(set(states.values())), count=len(places),
    replaced=sum(a is not b for a, b in zip(before, during)),
    restored=sum(a is b for a, b in zip(before, after)))))
"""


def python(code: str, folder: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=lab.environment(folder, **env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


def test_all_is_installed_and_undone_without_a_trace(tmp_path: Path) -> None:
    import json

    seen = json.loads(python(UNDO, tmp_path))
    assert seen["states"] == ["installed"]
    assert seen["replaced"] == seen["restored"] == seen["count"] >= 16


CHOICE = """
import json, sys
import sglang.srt.server_args as s
from sglang.srt.arg_groups.overrides import resolution_result
args = s.ServerArgs(**json.loads(sys.argv[1] if len(sys.argv) > 1 else ARGUMENTS))
try:
    args.resolve_once()
    print(json.dumps([resolution_result(args, "quantization"), args.quantization]))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def choice(folder: Path, names: str, **arguments: object) -> list[str | None]:
    import json

    code = f"ARGUMENTS = {json.dumps(dict(device='cpu', **arguments))!r}\n" + CHOICE
    return json.loads(python(code, folder, FLASHPATCH=names, STANDIN_AMX="1"))


def test_the_precision_is_the_engines_where_none_was_asked_for(models: Path, tmp_path: Path) -> None:
    model = lab.checkpoint(models, "llama", 0)
    assert choice(tmp_path, "fp8", model_path=model)[0] == "fp8"
    assert choice(tmp_path, "bf16", model_path=model)[0] is None
    word, message = choice(tmp_path, "fp8_channel", model_path=model)
    assert word == "PatchError" and "not available on SGLang" in message and "fp8.sglang.quantization" in message
