"""Map the settings of FlowRL's published training scripts to verl 0.9, and set them with ``paper = true``.

Source: the math script for 7B and 32B models of the published code; arXiv 2509.15207, its training details.
"""

from __future__ import annotations

from collections.abc import Iterator

from flashpatch.patches._shared.verl_config import Get, JobConfig, is_chosen
from flashpatch.patches.flowrl.options import Choices

ACTOR = "actor_rollout_ref.actor"
LAYERS = f"{ACTOR}.porj_layer"
LOSS_KIND = f"{ACTOR}.tb_type"

SETTINGS = {
    "algorithm.adv_estimator": ("grpo", "gae"),
    "algorithm.norm_adv_by_std_in_grpo": (True, True),
    "data.train_batch_size": (512, 1024),
    "data.max_prompt_length": (2048, 512),
    "data.max_response_length": (8192, 512),
    "data.truncation": ("left", "error"),
    f"{ACTOR}.optim.lr": (1e-6, 1e-6),
    f"{ACTOR}.optim.lr_warmup_steps": (10, -1),
    f"{ACTOR}.optim.weight_decay": (0.1, 0.01),
    f"{ACTOR}.ppo_mini_batch_size": (32, 256),
    f"{ACTOR}.entropy_coeff": (0, 0),
    f"{ACTOR}.clip_ratio": (0.2, 0.2),
    f"{ACTOR}.clip_ratio_low": (0.2, 0.2),
    f"{ACTOR}.clip_ratio_high": (0.2, 0.2),
    "actor_rollout_ref.rollout.n": (8, 1),
    "actor_rollout_ref.rollout.temperature": (1.0, 1.0),
}
"""Settings by path: the published value, and verl's own, which does not count as chosen unless the command line
names it."""


def accept(job: JobConfig, chosen: Choices) -> None:
    """Set what `SETTINGS` has and the user did not choose, with ``paper``; drop the published code's own settings.

    verl refuses settings that its dataclasses do not know; `refusals` has checked them.
    """
    for path in (LAYERS, LOSS_KIND):
        drop(job, path)
    for path, (value, own) in SETTINGS.items() if chosen.paper else ():
        if not is_chosen(job.get, path, own, job.overrides):
            job.set(path, value, "the paper's")


def refusals(get: Get, chosen: Choices) -> Iterator[str]:
    """Yield the published code's own settings that ask for something else than the options of the family."""
    layers, kind = get(LAYERS), get(LOSS_KIND)
    if layers is not None and layers != chosen.num_layers:
        yield f"{LAYERS}={layers} (num_layers in [flowrl] is {chosen.num_layers}: set that)"
    if layers is not None and chosen.log_z != "learned":
        yield f"{LAYERS}={layers} (log_z = 'group' has no partition function)"
    if kind not in (None, "tempered_important_sampling"):
        yield f"{LOSS_KIND}={kind} (only the published tempered_important_sampling is known; see length and weight)"


def drop(job: JobConfig, path: str) -> None:
    """Remove a setting, if it is there."""
    if job.get(path) is None:
        return
    from omegaconf import open_dict

    holder, _, name = path.rpartition(".")
    node = job.config
    for key in holder.split("."):
        node = node[key]
    with open_dict(node):
        del node[name]
