"""Run jobs that update the drafter, with a fixed policy and with the real bandit."""

import sys
from pathlib import Path
from typing import Any

import eagle_job_common as lab


def refit(at: Path) -> None:
    """Send new weights to the drafter of a chain target: exact, noise, refused ones; then to the target."""
    import torch
    from safetensors.torch import load_file, save_file

    from flashpatch.patches.eagle.vllm import drafter_refit
    from flashpatch.verify.probes.eagle import tiny

    dtype = "bfloat16" if "fp8" in sys.argv[3] else "float32"  # which vLLM's fp8 does not take
    llm = lab.opened(at / "chain", at / "exact", enable_prefix_caching=False, dtype=dtype)
    core, controller = lab.core_of(llm), lab.controller_of(llm)
    real, controller.policy = controller.policy, lab.Cycle([3])
    seen: dict[str, Any] = {"arms": list(map(str, real.arms)), "acceptance": {}, "tokens": {}, "refused": {}}

    def ask(name: str, tokens: int = 60) -> None:
        drafts, accepted = controller.drafts, controller.accepted
        seen["tokens"][name] = lab.tokens_of(lab.generate(llm, lab.prompts()[:4], max_tokens=tokens))
        seen["acceptance"][name] = 1 + (controller.accepted - accepted) / max(1, controller.drafts - drafts)

    def update(path: Path, version: int) -> Any:
        return llm.collective_rpc("eagle_update_drafter", args=(str(path), version))

    def drafter() -> dict[str, Any]:
        runner = core.model_executor.driver_worker.worker.model_runner
        return dict(
            shares_embeddings=runner.drafter.model.model.embed_tokens is runner.model.model.embed_tokens,
            shares_head=runner.drafter.model.lm_head is runner.model.lm_head,
        )

    ask("exact")
    seen["update"] = update(at / "noise", 1)
    ask("noise", 12)
    update(at / "exact2", 2)
    ask("exact again")
    tensors = load_file(at / "exact" / "model.safetensors")
    bad = {
        "target's names": load_file(at / "chain" / "model.safetensors"),
        "a head": {**tensors, "lm_head.weight": torch.zeros(tiny.VOCAB, tiny.HIDDEN)},
        "missing": {name: tensor for name, tensor in tensors.items() if "fc" not in name},
        "shape": {**tensors, "fc.weight": torch.zeros(3, 3)},
        "nan": {**tensors, "fc.weight": tensors["fc.weight"] * float("nan")},
    }
    for name, wrong in bad.items():
        save_file(wrong, at / "bad.safetensors")
        seen["refused"][name] = lab.refusal(lambda: update(at / "bad.safetensors", 9))
    (at / "cut.safetensors").write_bytes((at / "bad.safetensors").read_bytes()[:-9])
    seen["refused"]["cut"] = lab.refusal(lambda: update(at / "cut.safetensors", 9))
    seen["refused"]["gone"] = lab.refusal(lambda: update(at / "gone", 9))
    ask("after refusals")
    seen["shared"] = [drafter()]
    seen["log"] = list(drafter_refit.versions_of(core).log)
    before = controller.policy.refreshed
    llm.collective_rpc("reload_weights", kwargs=dict(weights_path=str(at / "chain2")))
    seen["refreshed"] = controller.policy.refreshed - before
    ask("new target")
    update(at / "exact2", 3)
    ask("new target, new drafter")
    seen["shared"].append(drafter())
    from flashpatch import ledger

    seen["notes"] = ledger.notes()
    import flashpatch

    flashpatch.disable()
    seen["unknown then"] = lab.refusal(lambda: update(at / "exact", 4))
    controller.policy = lab.Cycle([0])  # which is not called any more
    ask("after disable")
    seen["lookup"] = core.scheduler.dynamic_sd_lookup
    lab.leave(at, seen)


def adapt(at: Path) -> None:
    """Run the real bandit on a simulated clock: drafts pay while they are exact, and not once they are noise."""
    llm = lab.opened(at / "chain", at / "exact")
    controller = lab.controller_of(llm)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.5 + 0.15 * (controller.recent[-1].steps if controller.recent else 0)
        return now

    controller.clock = clock
    seen: dict[str, Any] = {"recent": {}}

    def ask(name: str) -> None:
        lab.generate(llm, lab.prompts()[:2] * 3, max_tokens=150)
        seen["recent"][name] = [arm.steps for arm in controller.recent]

    ask("exact")
    llm.collective_rpc("eagle_update_drafter", args=(str(at / "noise"), 1))
    ask("noise")
    ask("noise still")
    controller.note()
    from flashpatch import ledger

    seen["notes"] = ledger.notes()
    lab.leave(at, seen)
