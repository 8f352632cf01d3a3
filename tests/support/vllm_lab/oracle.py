"""What a fresh engine answers, asked in another process, in which no patch is on.

Updated engines are compared to it to the last bit, so on a CPU it multiplies as they do: with the family's kernels
for fp8 (`fp8_standin.KERNELS`).

oracle.answers(model, quantization="fp8_per_channel")     # cached in the store"""

import atexit
import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_lab import engines, environment, fp8_standin, scenario

#: No FLASHPATCH (environment.clean sees to that), and of the plugins only the fp8 stand-in.
ENV = {"VLLM_PLUGINS": "lab_fp8_standin,lab_cpu", fp8_standin.KERNELS: "1"}

_runners: dict[tuple[int, str], scenario.Runner] = {}


def answers(
    model: str | os.PathLike[str], *, env: Mapping[str, str | None] | None = None, **kw: Any
) -> dict[str, Any]:
    """`engines.answers` of a fresh engine on `model`; `kw` as for `ask`, `env` on top of the oracle's."""
    key = json.dumps([_content(Path(model)), kw, dict(env or {}), _versions()], sort_keys=True)
    kept = environment.store() / "answers" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
    if not kept.exists():
        fresh = _runner(env or {})(ask, str(model), **kw)
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(fresh))
        draft.replace(kept)
    found: dict[str, Any] = json.loads(kept.read_text())
    return found


def ask(model: str, tokens: int = engines.TOKENS, **kw: Any) -> dict[str, Any]:
    """Runs in the oracle's process. `tokens` to generate per prompt; `kw` as for open_llm."""
    with engines.open_llm(model, **kw) as llm:
        found = engines.answers(llm, tokens)
    flashpatch = sys.modules.get("flashpatch")
    if flashpatch is not None and fp8_standin.KERNELS not in os.environ:
        raise RuntimeError("the oracle is not independent: it has imported flashpatch")
    found_on = flashpatch.status().values() if flashpatch is not None else ()
    if on := [status.id for status in found_on if status.state.word != "disabled"]:
        raise RuntimeError(f"the oracle is not independent: {on[:5]} are on")
    return found


def close() -> None:
    """End the oracle's interpreters of this process; the next question starts another."""
    while _runners:
        _runners.popitem()[1].close()


def _runner(env: Mapping[str, str | None]) -> scenario.Runner:
    key = (os.getpid(), json.dumps(env, sort_keys=True))
    if key not in _runners:
        _runners[key] = scenario.Runner({**ENV, **env}, standin=True)
        atexit.register(close)
    return _runners[key]


def _content(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> list[str]:
    owners = importlib.metadata.packages_distributions()
    return [
        f"{name} {importlib.metadata.version(name)}"
        for module in ("vllm", "torch")
        for name in owners[module]
    ]
