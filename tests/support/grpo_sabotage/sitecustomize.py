"""Breaks the grpo family, in the way that $SABOTAGE names, in every process that carries it."""

import os

import wrapt


def stale_binding():
    """The counting wrapper is in place, but the engine calls the original under a name of its own."""

    def keep(module):
        honest = module.FSDPEngine.forward_backward_batch

        def forward_backward_batch(self, *args, **kwargs):
            import verl.workers.engine.utils as utils

            found = utils.prepare_micro_batches  # patched or not: whoever has mended the name since
            module.prepare_micro_batches = getattr(found, "__wrapped__", found)
            return honest(self, *args, **kwargs)

        module.FSDPEngine.forward_backward_batch = forward_backward_batch

    wrapt.register_post_import_hook(keep, "verl.workers.engine.fsdp.transformer_impl")


def no_resubmission():
    """Somebody restored verl's client."""

    def restore(module):
        module.LLMServerClient.generate = module.LLMServerClient.generate.__wrapped__

    wrapt.register_post_import_hook(restore, "verl.workers.rollout.llm_server")


if os.environ.get("FLASHPATCH"):
    globals()[os.environ["SABOTAGE"]]()
