"""Take the log-probabilities of the policy that generated a batch's advantages from the training forward itself.

Between two optimizer steps the policy does not change, and all rounds of a step lie between two. verl's
``old_log_probs`` are then what the training forward computes anyway: the forward that verl runs for them before each
step is saved. What depends on them (importance weights and rejection, ``algorithm.rollout_correction``) is computed in
the loss, by verl's own function.
"""

from __future__ import annotations

from typing import Any


class CurrentPolicy:
    """Complete a micro-batch before its loss, and keep what the forward found.

    Args:
        correction: verl's ``algorithm.rollout_correction`` as a mapping; None for no correction.
        entropy_gradient: whether the loss has an entropy term; without it no gradient goes through the entropy.
    """

    def __init__(self, correction: dict[str, Any] | None, entropy_gradient: bool) -> None:
        self.correction = correction
        self.entropy_gradient = entropy_gradient
        self.found: list[dict[str, Any]] = []

    def __call__(self, model_output: dict[str, Any], data: Any) -> None:
        """Set ``old_log_probs``, and with a correction ``rollout_is_weights`` and ``response_mask``.

        Args:
            model_output: ``log_probs`` and ``entropy``, jagged [samples, prompt and response].
            data: the micro-batch; ``response_mask`` and ``rollout_log_probs``, jagged [samples, response].
        """
        from verl.workers.utils.padding import response_from_nested

        kept = {
            name: model_output[name].detach() for name in ("log_probs", "entropy") if name in model_output
        }
        if "entropy" in kept and not self.entropy_gradient:
            model_output["entropy"] = kept["entropy"]
        self.found.append(kept)
        data["old_log_probs"] = response_from_nested(kept["log_probs"], data["response_mask"])
        counts = bool(data["response_mask"].values().any())  # not so in a filler, which verl would refuse
        if self.correction and counts and "rollout_log_probs" in data:
            self._correct(data)

    def take(self) -> dict[str, Any]:
        """Return what the micro-batches since the last call found, in their order, and forget it."""
        import torch

        found, self.found = self.found, []
        return {
            name: torch.nested.as_nested_tensor(
                [row for one in found for row in one[name].unbind()], layout=torch.jagged
            )
            for name in (found[0] if found else ())
        }

    def _correct(self, data: Any) -> None:
        from verl.protocol import DataProto
        from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
        from verl.workers.utils.padding import response_to_nested

        names = ("old_log_probs", "rollout_log_probs", "response_mask")
        padded = DataProto(batch=data.select(*names).to_padded_tensor())
        padded, _ = compute_rollout_correction_and_add_to_batch(padded, self.correction)
        outputs = data["response_mask"]
        for name in ("rollout_is_weights", "response_mask"):
            if name in padded.batch:
                data[name] = response_to_nested(padded.batch[name], outputs)
