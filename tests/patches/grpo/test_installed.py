"""The family on the installed verl: armed, standing aside where verl does as well, undone without a trace."""

import pytest

pytestmark = pytest.mark.verl
NAMES = ""


def test_armed_superseded_and_undone(scenario):
    scenario("""
        import verl.utils.config, verl.workers.engine.utils
        import verl.workers.engine.fsdp.transformer_impl as fsdp
        import verl.trainer.ppo.core_algos as algos, verl.workers.rollout.router
        import verl.utils.experimental.torch_functional as fused
        import verl.trainer.ppo.v1.trainer_base as trainers
        import verl.workers.rollout.llm_server, verl.trainer.main_ppo
        def look():  # beside the targets, which tests/patches/test_undo.py looks at
            return {"stale": fsdp.prepare_micro_batches, "mode": algos.POLICY_LOSS_REGISTRY.get("grpo_exact"),
                    "fused": fused.FusedLinearForPPO.forward, "trainers": trainers.get_trainer_cls}
        before = look()
        assert before["mode"] is None
        def refuse(*tensors):  # as flash-attn's kernel refuses tensors on the host
            raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
        fused._FLASH_ATTN_CROSS_ENTROPY_AVAILABLE, fused.cross_entropy_loss = True, refuse
        import flashpatch
        flashpatch.enable("grpo")
        during = look()
        states = {id: one.state.word for id, one in flashpatch.status().items() if id.startswith("grpo.verl.")}
        aside = {"grpo.verl.fused_linear_for_ppo_forward"}
        assert {id for id, word in states.items() if word == "superseded"} == aside, states
        assert {word for id, word in states.items() if id not in aside} == {"installed"}, states
        assert {name for name, then in before.items() if during[name] is not then} == {"stale", "mode", "trainers"}
        flashpatch.disable()
        assert all(look()[name] is then for name, then in before.items())
        # Asked for, ours takes the place of verl's fused log-probabilities, with its numbers.
        import torch
        flashpatch.enable("grpo", logprobs=True)
        assert fused.FusedLinearForPPO.forward is not before["fused"]
        states, head, labels = torch.randn(2, 9, 8), torch.randn(30, 8), torch.randint(0, 30, (2, 9))
        ours = fused.FusedLinearForPPO().forward(states, head, labels, temperature=0.9)
        flashpatch.disable()
        fused._FLASH_ATTN_CROSS_ENTROPY_AVAILABLE = False
        theirs = fused.FusedLinearForPPO().forward(states, head, labels, temperature=0.9)
        torch.testing.assert_close(ours, theirs)
        assert all(look()[name] is then for name, then in before.items())
    """)


def test_without_its_loss_the_mode_is_not_registered_and_no_step_owes_a_call(scenario):
    """`flashpatch-verify --live` asks for a call of each registered patch once there were steps."""
    scenario("""
        import flashpatch
        import verl.trainer.ppo.core_algos as algos
        import verl.utils.config as config, verl.workers.engine.utils
        stock = dict(algos.POLICY_LOSS_REGISTRY), config.validate_config
        flashpatch.enable("grpo", loss=False)
        states = flashpatch.status()
        assert states["grpo.verl.register_policy_loss"].state.word == "superseded"
        assert algos.POLICY_LOSS_REGISTRY == stock[0] and config.validate_config is not stock[1]
        assert states["grpo.verl.prepare_micro_batches"].state.word == "installed"
        flashpatch.disable()
        assert algos.POLICY_LOSS_REGISTRY == stock[0] and config.validate_config is stock[1]
    """)
