"""What a trainer built on Transformers' ``Trainer`` logs of its rollouts.

>>> from flashpatch.patches.fp8.transformers import RolloutMetrics
>>> RolloutMetrics().add_to(trainer)
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from flashpatch.patches.fp8.transformers.rollout_metrics import RolloutMetrics as RolloutMetrics

__all__ = ["RolloutMetrics"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashpatch.patches.fp8.transformers import rollout_metrics

    return getattr(rollout_metrics, name)
