"""The family's probe: a tiny engine speculates, is watched, and gets other drafters while it runs.

The engine runs in processes of its own (`flashpatch.patches.eagle.probe_job`) and is opened with a drafter that
is nearly always right, then given one that is noise, then a right one. What it said and captured is compared
with Hugging Face's forward of the same checkpoint here, and what it decided is read from the ledger.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle import probe_job, ring
from flashpatch.proof import Proof

_PATIENCE = 300.0
_TAIL = 700
_CLOSE = 2e-4  # between float32 kernels that add up in another order; values are of order 1
_ADDS = 0.02  # what the target's layers add, for states to depend on the context and drafts to be right


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the engine, then weigh what it did."""
    if find_spec("vllm") is None:
        return [_proof("an engine opens", "vLLM is not installed here")]
    from flashpatch.patches.eagle import tiny

    tiny.target(workdir / "target", seed=2, adds=_ADDS)
    for seed, name in enumerate(probe_job.ROUNDS):
        tiny.drafter(workdir / name, exact=name != "noise", seed=seed)
    ended = _run(workdir, {**os.environ, **tiny.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    path = workdir / "seen.json"
    seen = json.loads(path.read_text()) if path.exists() else {}
    if ended or "captured" not in seen:
        return [_proof("an engine opens and generates", seen.get("failed") or ended or "it saw nothing")]
    notes = _notes(nonce)
    return [
        _proof("an engine opens and generates", "", "3 drafters in turn", seen["seconds"]["opened"]),
        *_weigh(workdir, seen, notes),
        _called(nonce),
    ]


def _weigh(workdir: Path, seen: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[Proof]:
    from flashpatch.patches.eagle.ring import Reader

    yield _greedy(workdir / "target", seen)
    yield _aligned(workdir / "target", Reader(_ring(notes)).take(10_000), seen)
    yield _switched(notes.get("eagle_speculation"))
    yield _synced(notes.get("eagle_drafter"))


def _greedy(target: Path, seen: Mapping[str, Any]) -> Proof:
    what = "greedy tokens are those of the target alone, whatever the drafter and the number of tokens"
    rounds = [row for rows in seen["tokens"].values() for row in rows]
    if any(row != rounds[0] for row in rounds):
        return _proof(what, "the tokens depend on the drafter")
    for prompt, tokens in zip(probe_job.prompts(), rounds[0], strict=True):
        _, best = _forward(target, prompt + tokens)
        if best[len(prompt) - 1 : -1].tolist() != tokens:
            return _proof(what, "they are not those of a forward")
    return _proof(what, "", f"{len(rounds)} rounds of {sum(map(len, rounds[0]))} tokens, all equal")


def _aligned(target: Path, samples: list[Any], seen: Mapping[str, Any]) -> Proof:
    what = "captured states are those of a forward of the same tokens, position by position"
    said = [p + t for rows in seen["tokens"].values() for row in rows for p, t in zip(probe_job.prompts(), row)]
    rows, worst = 0, 0.0
    for sample in samples:
        tokens = sample.input_ids.tolist()
        if tokens not in said:
            return _proof(what, "a sample holds tokens that the engine never gave")
        states, _ = _forward(target, tokens)
        rows += int(sample.known.sum())
        worst = max(worst, float((sample.hidden - states)[sample.known].abs().max()))
    evidence = f"{len(samples)} samples, {rows} states, largest difference {worst:.2g}"
    counts = seen["captured"]
    whole = rows > 500 and not counts["lost"] and not counts["mismatched"]
    return _proof(what, "" if whole and worst < _CLOSE else f"{evidence}; {counts}", evidence)


def _switched(told: Any) -> Proof:
    what = "the bandit chooses the number of tokens, and learns from the steps"
    if not isinstance(told, dict):
        return _proof(what, f"the ledger says nothing of it: {told!r}")
    pulls = {name.split("/")[1]: n for name, n in told.items() if name.endswith("/pulls") and n}
    evidence = f"{told['steps']} steps, {told['counted']} counted, pulls {pulls}"
    return _proof(what, "" if len(pulls) > 1 and told["counted"] > 20 else evidence, evidence)


def _synced(told: Any) -> Proof:
    what = "new drafter weights arrive: acceptance falls with noise, which goes back, and rises with better ones"
    log = (told or {}).get("log", ())
    updates = [event for event in log if event["event"] == "update"]
    if len(updates) != len(probe_job.ROUNDS):
        return _proof(what, f"the ledger shows {len(updates)} of {len(probe_job.ROUNDS)} updates")
    judged = {event["version"]: event["after"] for event in log if event["event"] in ("kept", "worse")}
    exact, noise, again = updates[0]["before"], judged.get(1, 0.0), judged.get(2, updates[2]["before"])
    back = [event["version"] for event in log if event["event"] == "rollback"][:1] == [0]
    evidence = f"tokens per step {exact:.2f}, {noise:.2f} with noise, {again:.2f} after; went back: {back}"
    return _proof(what, "" if back and exact > 2 * noise > 0 and again > 2 * noise else evidence, evidence)


def _called(nonce: str) -> Proof:
    what = "hooks were called in worker and engine core"
    calls: dict[str, int] = {}
    for row in _rows(nonce):
        for id, entry in row.patches.items():
            calls[id] = calls.get(id, 0) + entry["calls"]
    due = ("capture", "ends", "ending", "orders", "dynamic", "speculate", "reward", "sync", "versions")
    idle = [name for name in due if not calls.get(f"eagle.vllm.{name}")]
    evidence = f"{sum(calls.values())} calls of {sum(map(bool, calls.values()))} patches"
    return _proof(what, f"never called: {', '.join(idle)}" if idle else "", evidence)


def _forward(target: Path, tokens: list[int]) -> tuple[Any, Any]:
    """States [n, H] after the final norm, and the best next token at each position."""
    import torch
    from transformers import LlamaForCausalLM

    if target not in _models:
        _models[target] = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        found = _models[target](torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0], found.logits[0].argmax(-1)


_models: dict[Path, Any] = {}


def _ring(notes: Mapping[str, Any]) -> Path:
    return Path(notes["eagle_ring"]) if "eagle_ring" in notes else ring.place()


def _notes(nonce: str) -> dict[str, Any]:
    """What the probe's processes noted, together."""
    return {name: value for row in _rows(nonce) for name, value in row.notes.items()}


def _rows(nonce: str) -> list[Any]:
    return [row for run in ledger.read() if run.id == nonce for row in run.rows]


def _run(workdir: Path, environment: Mapping[str, str]) -> str:
    """Run the job; how it ended, empty for well."""
    code = f"from {probe_job.__name__} import main; main()"
    with (workdir / "job.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(workdir)],
            env=dict(environment), cwd=workdir, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    try:
        status: int | None = process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # what is left of it and of its children
        except ProcessLookupError:
            pass
        process.wait()
    if status == 0:
        return ""
    how = f"ended with status {status}" if status is not None else "did not end in time"
    return f"the job {how}: ...{(workdir / 'job.log').read_text(errors='replace').strip()[-_TAIL:]}"


def _proof(what: str, problem: str, evidence: str = "", seconds: float = 0.0) -> Proof:
    return Proof("eagle", what, not problem, problem or evidence, seconds)
