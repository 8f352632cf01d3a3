"""Probe family eagle: a tiny engine speculates, captures hidden states, and gets other drafters while it runs, one of them
noise.

Its tokens and states are compared with Hugging Face's forward of the same checkpoint in this process; the bandit's choices are
read from the ledger."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashpatch import ledger
from flashpatch.patches.eagle.capture import sample_queue
from flashpatch.settings import selections
from flashpatch.verify.probes import jobs
from flashpatch.verify.probes.eagle.job import DRAFTERS
from flashpatch.verify.proof import Proof

_proof = functools.partial(Proof, "eagle")
_TIMEOUT = 300.0  # seconds
_CLOSE = 2e-4  # between float32 kernels that add up in another order; values are of order 1
_CLOSE_TF32 = 0.05  # on a GPU, whose attention rounds the factors of its products to 10 bits
_ARMS = ["1_1_2", "2_1_3", "3_1_4"]
"""Arms of the bandit. With ``disable`` it would seldom speculate if a draft costs more than a token, and no drafter
could be judged."""
_ADDS = 0.02  # what the target's layers add, for states to depend on the context and drafts to be right


def probe(nonce: str, workdir: Path) -> list[Proof]:
    """Run the engine that is installed, vLLM if both are, then judge what it did."""
    from flashpatch.verify.probes.eagle import tiny

    engine, what = jobs.engine(), "an engine opens and generates"
    tiny.target(workdir / "target", seed=2, adds=_ADDS)
    for seed, drafter in enumerate(DRAFTERS):
        tiny.drafter(workdir / drafter, exact=drafter != "noise", seed=seed, engine=engine.NAME)
    queue = workdir / "samples"
    on = selections.from_environment(selections.NOTHING)
    on = selections.extend(on, on.names, None, {"arms": _ARMS, "samples": str(queue)})
    given = {"FLASHPATCH_RESOLVED": selections.resolved(os.environ["FLASHPATCH"], on)}
    environment = {**tiny.ENVIRONMENT, **engine.APART, **given}
    commands = [jobs.job("eagle.job:run", workdir, environment=environment)]
    seen = jobs.run(commands, workdir, _TIMEOUT).checked().seen["job"]
    rows = [row for run in ledger.read() if run.id == nonce for row in run.rows]
    notes = {name: value for row in rows for name, value in row.notes.items()}
    samples = sample_queue.SampleReader(queue).read_samples(10_000)
    learns = "the bandit chooses the number of tokens, and learns from the steps"
    follows = "new drafter weights arrive: acceptance falls with noise, and rises with better ones"
    return [
        _proof(what, True, f"{len(seen['answers'])} answers with {len(DRAFTERS)} drafters", seen["opened"]),
        _drawn(workdir / "target", seen["answers"], "raw" if engine.NAME == "vllm" else "asked"),
        _aligned(workdir / "target", samples, seen),
        _proof(learns, *bandit_adapts(notes)),
        _proof(follows, *drafter_follows(notes)),
    ]


def _drawn(target: Path, answers: Sequence[Any], returned: str) -> Proof:
    what = "tokens are the target's alone, sampled ones from its distribution as asked for, each by itself; log-probabilities are right"
    from flashpatch.verify import sampled

    tally = sampled.Tally(_close())
    for one in answers:
        _, logits = _forward(target, one["prompt"] + one["tokens"])
        own = logits[len(one["prompt"]) - 1 : -1]
        tally.add(own, one["prompt"], one["asked"], one["tokens"], one["logprobs"], returned)
    evidence = f"{tally.outside} of {tally.tokens} tokens could not be drawn, likelihood off by {tally.off:.1f} standard deviations"
    evidence += f", alike by {tally.shared:.1f}"
    return _proof(what, tally.good, f"{evidence}, log-probabilities by {tally.worst:.1g}")


def _aligned(target: Path, samples: list[Any], seen: Mapping[str, Any]) -> Proof:
    what = "captured states are those of a forward of the same tokens, position by position"
    counts, answered = seen["captured"], [one["prompt"] + one["tokens"] for one in seen["answers"]]
    rows, worst = 0, 0.0
    for sample in samples:
        tokens = sample.input_ids.tolist()
        if tokens not in answered:
            return _proof(what, False, "a sample holds tokens that the engine never generated")
        states, _ = _forward(target, tokens)
        rows += int(sample.known.sum())
        worst = max(worst, float((sample.hidden - states)[sample.known].abs().max()))
    evidence = f"{len(samples)} samples, {rows} states, largest difference {worst:.2g}"
    good = rows > 500 and worst < _close() and not counts["lost"] and not counts["mismatched"]
    return _proof(what, good, evidence if good else f"{evidence}; {counts}")


def _close() -> float:
    import torch

    return _CLOSE_TF32 if torch.cuda.is_available() else _CLOSE


def _forward(target: Path, tokens: list[int]) -> tuple[Any, Any]:
    """Return hidden states [n, H] after the final norm, and logits [n, V]."""
    import torch

    with torch.no_grad():
        found = _model(target)(torch.tensor([tokens]), output_hidden_states=True)
    return found.hidden_states[-1][0], found.logits[0]


@functools.cache
def _model(target: Path) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


def bandit_adapts(notes: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether the bandit ran several arms and learned from their steps, and the evidence."""
    found = notes.get("eagle_bandit")
    if not isinstance(found, dict):
        return False, f"the ledger has no choices of the bandit: {notes.get('eagle_bandit_off', found)!r}"
    pulls: dict[str, float] = {}
    for name, number in found.items():
        if name.endswith("/pulls") and number:
            arm = name.split("/")[1]
            pulls[arm] = pulls.get(arm, 0) + number
    return len(pulls) > 1 and found["steps"] > 20, f"{found['steps']:.0f} steps, pulls {pulls}"


def drafter_follows(notes: Mapping[str, Any]) -> tuple[bool, str]:
    """Return whether acceptance fell with the drafter of noise and was higher with those before and after it, and the
    evidence."""
    log = notes.get("eagle_drafter", {}).get("log", ())
    versions, sent = [update["version"] for update in log], [*range(1, 1 + len(DRAFTERS))]
    if versions != sent:
        return False, f"the ledger has updates to versions {versions}, sent were {sent}"
    exact, noise, again = (update["before"] for update in log)
    good = exact > 2 * noise > 0 and again > 2 * noise
    return good, f"tokens per step {exact:.2f}, {noise:.2f} with noise, {again:.2f} after"
