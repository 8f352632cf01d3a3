"""Check and complete the settings of a job whose kept tokens travel to the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from packaging.version import Version

from flashpatch.patches._shared.verl_config import Get, JobConfig

ROLLOUT, ACTOR, MODEL = (f"actor_rollout_ref.{name}" for name in ("rollout", "actor", "model"))
MOST = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
FIRST_SGLANG = Version("0.5.21")
ADVICE = "Change these settings, or set fp8's option support=0."


def prepare(job: JobConfig, width: int) -> None:
    """Refuse what cannot be served, and let vLLM return ``width`` log-probabilities; nothing if ``width`` is 0. Raises
    PatchError, which names all settings that stand against it."""
    if not width:
        return
    job.refuse(refusals(job.get, width), "cannot renormalize over the kept tokens with", ADVICE)
    if job.get(f"{ROLLOUT}.name") == "sglang":
        return
    most = job.get(MOST)
    if most is None or 0 <= most < width:
        job.set(MOST, width, "the kept tokens are read from the log-probabilities (fp8's option support)")


def refusals(get: Get, width: int) -> Iterator[str]:
    """Yield the settings under which kept tokens cannot be had or used, each with the reason."""
    top_k = get(f"{ROLLOUT}.top_k")
    if not top_k or not 0 < top_k <= width:
        yield f"{ROLLOUT}.top_k={top_k} (support={width} needs one of 1 to {width}: it bounds the kept tokens)"
    name = get(f"{ROLLOUT}.name", "vllm")
    if name not in ("vllm", "sglang"):
        yield f"{ROLLOUT}.name={name} (kept tokens are read from vLLM and SGLang)"
    if name == "sglang":
        yield from _of_sglang(get, width)
    elif get(f"{ROLLOUT}.logprobs_mode") != "processed_logprobs":
        yield f"{ROLLOUT}.logprobs_mode={get(f'{ROLLOUT}.logprobs_mode')} (kept tokens are read from processed_logprobs)"
    if get(f"{ROLLOUT}.calculate_log_probs") is not True:
        yield f"{ROLLOUT}.calculate_log_probs={get(f'{ROLLOUT}.calculate_log_probs')} (kept tokens come with them: True)"
    if get("trainer.use_v1", True) is False:
        yield "trainer.use_v1=False (the older trainer's samples have no field for them)"
    if get("trainer.v1.trainer_mode") == "stream_async":
        yield "trainer.v1.trainer_mode=stream_async (its rounds have no field for them)"
    if get(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={get(f'{ACTOR}.strategy')} (only FSDP actors renormalize)"
    for path, why in _SWITCHES.items():
        if get(path):
            yield f"{path}={get(path)} ({why})"


def _of_sglang(get: Get, width: int) -> Iterator[str]:
    installed = Version(version("sglang"))
    if installed < FIRST_SGLANG:
        yield f"SGLang {installed} (its sampling masks are read from {FIRST_SGLANG} on)"
    own = f"{ROLLOUT}.engine_kwargs.sglang"
    if get(f"{own}.speculative_algorithm"):
        yield f"{own}.speculative_algorithm={get(f'{own}.speculative_algorithm')} (SGLang has no masks of verified drafts)"
    most = get(f"{own}.sampling_mask_max_tokens")
    if most is not None and most < width:
        yield f"{own}.sampling_mask_max_tokens={most} (SGLang stops a request that keeps more; support={width})"


_SWITCHES = {
    f"{MODEL}.use_fused_kernels": "they compute log-probabilities without logits",
    f"{ACTOR}.use_prefix_grouper": "it computes log-probabilities by itself",
    "distillation.enabled": "a teacher's probabilities are over the whole vocabulary",
    f"{ROLLOUT}.engine_kwargs.vllm.speculative_config": "the log-probabilities of verified drafts were not compared",
    f"{ROLLOUT}.mtp.enable_rollout": "the log-probabilities of verified drafts were not compared",
}
