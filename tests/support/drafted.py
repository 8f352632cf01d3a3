"""Engines with a drafter beside the policy: tiny checkpoints, greedy tokens, how many drafts were made and accepted.

Functions that take an engine run in its process; those whose first argument is `worker` on each rank."""

import contextlib
from pathlib import Path
from typing import Any

from eagle_job_common import core_of, prompts
from vllm_lab import engines, environment, models

METHODS = ("eagle", "draft_model")


def checkpoints() -> dict[str, str]:
    """Write the checkpoints: chain targets a and b, their exact EAGLE drafter and a bad one, and copies of a and b."""
    from flashpatch.verify.probes.eagle import tiny

    root = environment.store() / "drafted"
    made = {name: root / name for name in ("a", "b", "exact", "noise", "a copy", "b copy")}
    with models.making(root) as (_, work):
        if work is not None:
            for name, seed in (("a", 2), ("b", 4)):
                for suffix in ("", " copy"):
                    tiny.target(work / (name + suffix), seed=seed, adds=0.0)
            tiny.drafter(work / "exact")
            tiny.drafter(work / "noise", exact=False)
    return {name: str(path) for name, path in made.items()}


def drafters(at: dict[str, str], method: str) -> tuple[str, str]:
    """Return the checkpoints of a good and of a bad drafter for the target a."""
    return (at["exact"], at["noise"]) if method == "eagle" else (at["a copy"], at["b copy"])


@contextlib.contextmanager
def opened(target: str, drafter: str | None, method: str, options: dict[str, Any], **kw: Any):
    """An engine without quantization, in which FlashPatch is on (``options`` not None) and a drafter speculates."""
    import flashpatch
    from flashpatch.verify.probes.eagle import tiny

    speculative = dict(method=method, model=drafter, num_speculative_tokens=3)
    keywords = {
        **tiny.engine_arguments(Path(target), block_size=32),
        **(dict(speculative_config=speculative) if drafter else {}),
        **kw,
    }
    if options is not None:
        flashpatch.enable("bf16", **options)
    with engines.open_llm(keywords.pop("model"), **keywords) as llm:
        yield llm
    if options is not None:
        flashpatch.disable("bf16")


def tokens(llm: Any, count: int = 16) -> list[list[int]]:
    """Greedy continuations, one prompt at a time; four times 16 tokens."""
    sampling = engines.sampling(count)
    asked = ({"prompt_token_ids": prompt} for prompt in prompts()[2:6])
    return [engines.tokens_of(llm.generate(one, sampling, use_tqdm=False)[0]) for one in asked]


def spoken(llm: Any, count: int = 16) -> dict[str, Any]:
    """Greedy continuations, and how many draft tokens were verified and accepted for them."""
    scheduler, drafted = core_of(llm).scheduler, dict(verified=0, accepted=0)
    original = scheduler.make_spec_decoding_stats

    def counting(*args: Any, **kw: Any) -> Any:
        drafted["verified"] += kw["num_draft_tokens"] if "num_draft_tokens" in kw else args[1]
        drafted["accepted"] += kw["num_accepted_tokens"] if "num_accepted_tokens" in kw else args[2]
        return original(*args, **kw)

    scheduler.make_spec_decoding_stats = counting
    try:
        return dict(tokens=tokens(llm, count), **drafted)
    finally:
        del scheduler.make_spec_decoding_stats


def fresh(target: str) -> list[list[int]]:
    """Greedy continuations of an engine that FlashPatch and a drafter have no part in."""
    with opened(target, None, "", None) as llm:
        return tokens(llm)


def send(worker: Any, path: str, to: str, bad: bool = False, shared: str = "") -> None:
    """On each rank: a checkpoint into the target or the drafter; ``bad``: with a NaN in it; ``shared``: the policy whose
    embedding and head come too, which an EAGLE drafter has from its target."""
    model = worker.get_model() if to == "target" else worker.model_runner.drafter.model
    weights = dict(models.weights(path))
    if bad:
        last = max(name for name in weights if "down_proj" in name)
        weights[last] = weights[last] * float("nan")
    if shared:
        policy = dict(models.weights(shared))
        weights |= {"embed_tokens.weight": policy["model.embed_tokens.weight"]}
        weights |= {"lm_head.weight": policy["lm_head.weight"]}
    model.load_weights(weights.items())
