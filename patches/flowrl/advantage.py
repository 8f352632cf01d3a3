"""Compute what FlowRL needs of whole groups in the driver: the group's log Z, and the reward as it is."""

from __future__ import annotations

from typing import Any

from flashpatch.errors import PatchError
from flashpatch.patches.flowrl import options
from flashpatch.record import Contract, Patch

ID = "flowrl.verl.compute_advantage"
TRAINER = "verl.trainer.ppo.ray_trainer"
NEEDED = ("old_log_probs", "ref_log_prob", "token_level_rewards", "response_mask")


def on_compute_advantage(original, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Change verl's advantages, ``(batch, tokens)``, as the options ``reward`` and ``log_z`` say.

    With ``reward = "raw"`` they become the response's reward. With ``log_z = "group"`` the group's log Z is
    subtracted, in units of the reward: the residual of FlowRL's loss then needs no log Z of its own. Here all
    responses to a prompt are together, however they are spread over ranks and micro-batches later.

    Raises:
        PatchError: the batch lacks what the group's log Z is computed from.
    """
    done = original(data, *args, **kwargs)
    chosen = options.current()
    if chosen.reward == "raw":
        done.batch["advantages"] = _spread(done.batch["token_level_rewards"].sum(-1), done.batch)
    if chosen.log_z == "group":
        done.batch["advantages"] = less_log_z(done.batch, done.non_tensor_batch.get("uid"), chosen)
    return done


def _spread(values: Any, batch: Any) -> Any:
    """Repeat a number per response, ``(batch,)``, over its tokens; 0 at those that do not count."""
    return values.unsqueeze(-1) * batch["response_mask"]


def less_log_z(batch: Any, uids: Any, chosen: options.Choices) -> Any:
    """Return the advantages less ``log Z / beta`` of each response's group, ``(batch, tokens)``.

    Args:
        batch: verl's tensors by name.
        uids: of each response's prompt, ``(batch,)``.

    Raises:
        PatchError: something is missing.
    """
    import numpy
    import torch

    from flashpatch.patches.flowrl.objective import group_log_z

    missing = [name for name in NEEDED if name not in batch.keys()]
    missing += ["uid"] if uids is None else []
    if missing:
        raise PatchError(
            f"cannot compute log Z of a group: the batch lacks {', '.join(missing)}.",
            patch=ID,
            target=PATCH.targets[0],
            advice='Set log_z = "learned" in [flowrl], or use a trainer that computes the reference before advantages.',
        )
    advantages = batch["advantages"]
    numbers = numpy.unique(numpy.asarray(uids, dtype=str), return_inverse=True)[1]
    log_z = group_log_z(
        batch["old_log_probs"],
        batch["ref_log_prob"],
        advantages,
        batch["response_mask"].bool(),
        torch.as_tensor(numbers, device=advantages.device),
        beta=chosen.beta,
        length=chosen.length,
    )
    return advantages - _spread(log_z.to(advantages.dtype) / chosen.beta, batch)


PATCH = Patch(
    id=ID,
    targets=(f"{TRAINER}:compute_advantage",),
    requires="verl>=0.9",
    wrapper=on_compute_advantage,
    contract=Contract(
        params=("data", "adv_estimator"),
        mentions=("data.batch", "data.non_tensor_batch"),
        exists=("verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories",),
    ),
    evidence="optional",  # only one of a job's drivers has it
    scope=frozenset({"driver"}),
    why="A log Z estimated from the responses to one prompt needs all of them: micro-batches and ranks split groups.",
    how='With log_z = "group" subtracts the group\'s log Z from the advantages once, before they go to the workers; '
    'with reward = "raw" replaces them by the reward. Otherwise changes nothing.',
    remove_when="verl has a trajectory-balance loss with a group estimate of log Z.",
    upstream="VarGrad, arXiv 2010.10436",
)
