"""verl's entry points by family, each started as ``python -m`` with its job in one process until it would make workers: a job has
what the family sets, or is refused by name; supervised training has none of these settings, and nothing is done."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import cpu_lab
import pytest

pytestmark = pytest.mark.verl
DRIVER = """
import json, runpy, sys, types
import ray, transfer_queue, verl.utils.distributed, verl.utils.fs
from omegaconf import OmegaConf
module, wanted, *sys.argv[1:] = json.loads(sys.argv[1])
jobs = []
def stop(*_, **__):
    print("FOUND" + json.dumps({path: OmegaConf.select(jobs[0], path) for path in wanted if jobs}))
    sys.exit()
def started(actor):
    run = lambda config: (jobs.append(config), actor.__ray_metadata__.modified_class().run(config))
    return types.SimpleNamespace(run=types.SimpleNamespace(remote=run))
ray.is_initialized, ray.get, ray.actor.ActorClass.remote = lambda: True, lambda done: done, started
verl.utils.fs.copy_to_local = transfer_queue.init = verl.utils.distributed.initialize_global_process_group = stop
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss.loss_mode"
CORRECTION, OWN = "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.bypass_mode=False"
GLOO = "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo"
SEARCH = "hydra.searchpath=[pkg://verl.trainer.config]"  # verl's is a path within its repository
FULLY = "verl.experimental.fully_async_policy.fully_async_main"
ENTRIES = {
    "main_ppo": ("verl.trainer.main_ppo",),
    "ray_trainer": ("verl.trainer.main_ppo", "trainer.use_v1=False"),
    "fully_async": (FULLY, OWN),
    "one_step_off": ("verl.experimental.one_step_off_policy.main_ppo", OWN, SEARCH),
}
MANY, FP8 = "fp8,grpo,fsdp,eagle", {CORRECTION: "token"}
SERVED = {
    MANY: {LOSS: "grpo_exact"},
    "flowrl": {LOSS: "flowrl", f"{ACTOR}.use_kl_loss": True},
    "cpu,bf16": {"trainer.device": "cpu"},
}
REFUSED = {
    "grpo": f"{LOSS}=gspo (",
    "flowrl": f"{ACTOR}.strategy=megatron (",
    "fsdp,bf16": "actor_rollout_ref.rollout.checkpoint_engine.backend=mooncake (",
    "cpu,bf16": "async_training.use_trainer_do_validate=True (",
}
CASES = [(names, *ENTRIES[entry], "", SERVED[names]) for entry in ENTRIES for names in SERVED]
CASES += [(names, FULLY, OWN, said, {}) for names, said in REFUSED.items()]
CASES += [("fp8", "verl.trainer.main_ppo", "", FP8), (MANY, "verl.trainer.sft_trainer", "", {})]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case[:2]))
def test_a_job_has_what_each_family_sets_or_is_refused(tmp_path, case):
    names, module, *own, refused, wanted = case
    own += [refused[:-2]] if "=" in refused else []
    own += [GLOO] if "cpu" in names and "experimental" in module and wanted else []
    own += [] if "sft" in module else ["algorithm.adv_estimator=grpo", f"{ACTOR}.use_dynamic_bsz=True"]
    given = json.dumps([module, [*wanted], f"hydra.run.dir={tmp_path}", *own])
    done = cpu_lab.python(DRIVER, tmp_path, arguments=[given], FLASHPATCH=names)
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("FOUND")]
    said = done.stdout + done.stderr
    assert found == ([] if refused else [wanted]) and refused in said, said[-4000:]
    assert ("eagle trains no drafter" in said) == (names == MANY and bool(wanted))


def test_quantization_aware_training_and_fsdp_turbo_leave_the_loss_as_it_is():
    """verl's engines ask for the first where they build, step and export, and the second has no forward or backward of its own."""
    engines = Path(find_spec("verl").submodule_search_locations[0], "workers", "engine", "fsdp")
    quantized, turbo = set(), set()
    for name in ("transformer_impl.py", "fsdp_turbo_impl.py"):
        for method in ast.walk(ast.parse((engines / name).read_text())):
            if isinstance(method, ast.FunctionDef):
                turbo |= {method.name} if "turbo" in name else set()
                quantized |= {method.name} if "_qat" in ast.unparse(method) else set()
    assert {"optimizer_step", "_build_module"} <= turbo and {"_apply_qat", "optimizer_step"} <= quantized
    loss = {
        "forward_backward_batch",
        "forward_step",
        "prepare_model_inputs",
        "prepare_model_outputs",
        "train_batch",
    }
    assert not loss & (quantized | turbo)
