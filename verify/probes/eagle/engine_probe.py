"""Probe family eagle: a tiny engine speculates, captures hidden states, and gets other drafters while it runs.

The engine runs in processes of its own. Its drafters are nearly always right, and one is noise
(`flashpatch.verify.probes.eagle.vllm_probe`, and on SGLang `flashpatch.verify.probes.eagle.sglang_probe`). Its
tokens and captured hidden states are compared with Hugging Face's forward of the same checkpoint in this process;
the bandit's choices are read from the ledger.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flashpatch.patches.eagle.capture import sample_queue
from flashpatch.proof import Proof
from flashpatch.settings import child_env, selections
from flashpatch.verify import processes
from flashpatch.verify.probes import calls
from flashpatch.verify.probes.eagle.rounds import prompts
from flashpatch.verify.processes import Command

_TIMEOUT = 300.0  # seconds
_CLOSE = 2e-4  # between float32 kernels that add up in another order; values are of order 1
_CLOSE_TF32 = 0.05  # on a GPU, whose attention rounds the factors of its products to 10 bits
_ARMS = ["1_1_2", "2_1_3", "3_1_4"]
"""Arms of the bandit. With ``disable`` it would seldom speculate if a draft costs more than a token, and no drafter
could be judged."""
_ADDS = 0.02  # what the target's layers add, for states to depend on the context and drafts to be right


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the engine that is installed, vLLM if both are, then judge what it did."""
    name = next((name for name in ("vllm", "sglang") if find_spec(name) is not None), None)
    if name is None:
        return [_proof("an engine opens", "neither vLLM nor SGLang is installed here")]
    from flashpatch.verify.probes.eagle import tiny, verl_sglang_probe

    engine = importlib.import_module(f"flashpatch.verify.probes.eagle.{name}_probe")
    tiny.target(workdir / "target", seed=2, adds=_ADDS)
    engine.models(workdir)
    main = processes.entry_point(engine.JOB, workdir)
    job = Command("job", main, {**tiny.ENVIRONMENT, **engine.ENVIRONMENT, **_options(arms=_ARMS)})
    ended = processes.problems(processes.run([job], workdir, _TIMEOUT))
    path = workdir / "seen.json"
    seen = json.loads(path.read_text()) if path.exists() else {}
    if ended or not seen.get("tokens"):
        return [_proof("an engine opens and generates", seen.get("failed") or ended or "it saw nothing")]
    notes = _notes(nonce)
    rounds = f"{len(seen['tokens'])} rounds with other drafters"
    return [
        _proof("an engine opens and generates", "", rounds, seen["seconds"]["opened"]),
        *_judge(workdir, seen, notes),
        calls.counted(nonce, f"eagle.{name}", engine.MORE),
        *(verl_sglang_probe.probe(workdir) if verl_sglang_probe.is_due() else ()),
    ]


def _options(**values: Any) -> dict[str, str]:
    """Return the variable that gives these options to a process, as ``enable()`` here would."""
    on = selections.from_environment(selections.NOTHING)
    on = selections.extend(on, on.names, None, values)
    options = {family: choice.options for family, choice in on.choices.items()}
    return {"FLASHPATCH_RESOLVED": child_env.resolved(os.environ["FLASHPATCH"], on.names, options, on.strict)}


def _judge(workdir: Path, seen: Mapping[str, Any], notes: Mapping[str, Any]) -> Iterator[Proof]:
    from flashpatch.patches.eagle.capture.sample_queue import SampleReader
    from flashpatch.verify.probes.eagle.notes import bandit_adapts, drafter_follows

    yield _greedy(workdir / "target", seen)
    counts = seen.get("captured") or notes.get("eagle_capture")
    yield _aligned(workdir / "target", SampleReader(_ring(notes)).read_samples(10_000), seen, counts)
    for what, (good, evidence) in (
        ("the bandit chooses the number of tokens, and learns from the steps", bandit_adapts(notes)),
        (
            "new drafter weights arrive: acceptance falls with noise, which is rolled back, and rises with better ones",
            drafter_follows(notes, seen.get("versions", ())),
        ),
    ):
        yield _proof(what, "" if good else evidence, evidence)


def _greedy(target: Path, seen: Mapping[str, Any]) -> Proof:
    what = "greedy tokens are those of the target alone, for every drafter and number of draft tokens"
    rounds = [row for rows in seen["tokens"].values() for row in rows]
    if any(row != rounds[0] for row in rounds):
        return _proof(what, "the tokens depend on the drafter")
    for prompt, tokens in zip(prompts(), rounds[0], strict=True):
        _, best = _forward(target, prompt + tokens)
        if best[len(prompt) - 1 : -1].tolist() != tokens:
            return _proof(what, "they are not those of a forward")
    return _proof(what, "", f"{len(rounds)} rounds of {sum(map(len, rounds[0]))} tokens, all equal")


def _aligned(target: Path, samples: list[Any], seen: Mapping[str, Any], counts: Any) -> Proof:
    import torch

    what = "captured states are those of a forward of the same tokens, position by position"
    answered = [p + t for rows in seen["tokens"].values() for row in rows for p, t in zip(prompts(), row)]
    rows, worst = 0, 0.0
    for sample in samples:
        tokens = sample.input_ids.tolist()
        if tokens not in answered:
            return _proof(what, "a sample holds tokens that the engine never generated")
        states, _ = _forward(target, tokens)
        rows += int(sample.known.sum())
        worst = max(worst, float((sample.hidden - states)[sample.known].abs().max()))
    evidence = f"{len(samples)} samples, {rows} states, largest difference {worst:.2g}"
    whole = isinstance(counts, dict) and rows > 500 and not counts["lost"] and not counts["mismatched"]
    close = _CLOSE_TF32 if torch.cuda.is_available() else _CLOSE
    return _proof(what, "" if whole and worst < close else f"{evidence}; {counts}", evidence)


def _forward(target: Path, tokens: list[int]) -> tuple[Any, Any]:
    """Return hidden states [n, H] after the final norm, and the most probable next token at each position [n]."""
    import torch
    from transformers import LlamaForCausalLM

    if target not in _models:
        _models[target] = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        found = _models[target](torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0], found.logits[0].argmax(-1)


_models: dict[Path, Any] = {}


def _ring(notes: Mapping[str, Any]) -> Path:
    return Path(notes["eagle_samples"]) if "eagle_samples" in notes else sample_queue.queue_directory()


def _notes(nonce: str) -> dict[str, Any]:
    """Return the notes of all the probe's processes, merged."""
    return {name: value for row in calls.rows(nonce) for name, value in row.notes.items()}


def _proof(what: str, problem: str, evidence: str = "", seconds: float = 0.0) -> Proof:
    return Proof("eagle", what, not problem, problem or evidence, seconds)
