"""A migrated script of each fork: verl's driver takes what the command prints, once its changes are made to the
script's command line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from verl_driver import validated

from flashpatch.commands import migrate

pytestmark = pytest.mark.verl
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMON = f"""
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
    data.max_prompt_length=1024 data.max_response_length=2048 data.truncation=error \\
    actor_rollout_ref.model.path=$MODEL {ACTOR}.optim.lr=1e-6 {ACTOR}.ppo_mini_batch_size=64 \\
    {ACTOR}.use_dynamic_bsz=True {ROLLOUT}.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True {ROLLOUT}.n=8 {ROLLOUT}.tensor_model_parallel_size=1 \\
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.nnodes=1 \\
    trainer.n_gpus_per_node=8 trainer.total_epochs=1 \\
"""
FLASHRL = f"""
export FLASHRL_CONFIG=fp8 FLASHRL_LMHEAD_FP32=1
python3 -m verl.trainer.main_ppo {COMMON} {ROLLOUT}.name=vllm algorithm.adv_estimator=grpo \\
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=512 \\
    reward_model.overlong_buffer.penalty_factor=1.0 critic.model.fsdp_config.param_offload=False \\
    {ACTOR}.imp_ratio_cap=2
"""
FASTRL = f"""
python3 -m verl.trainer.main_fastrl {COMMON} {ROLLOUT}.name=sglang {ROLLOUT}.mode=sync algorithm.adv_estimator=grpo \\
    speculative.enable=true speculative.eagle.spec_model_path=$DRAFTER speculative.bs_threshold=32 \\
    speculative.train.enable_drafter_training=true speculative.train.optim.lr=1e-6
"""
FLOWRL = f"""
python3 -m verl.trainer.main_ppo {COMMON} algorithm.adv_estimator=grpo \\
    +{ACTOR}.tb_type=tempered_important_sampling +{ACTOR}.porj_layer=3 \\
    {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.001 {ACTOR}.kl_loss_type=low_var_kl
"""
ASYNC_GRPO = """
python worker_dispatcher.py --mode generation --max_num_seqs 128 --model_path $MODEL
torchrun --nproc_per_node=8 trainer_core.py --model_name_or_path $MODEL --samples_per_question 8 --loss_chunksize 2048
"""


@pytest.fixture
def folders(tmp_path: Path, world: Path) -> dict[str, str]:
    """The variables of the scripts: a model and, beside it, what stands for a drafter."""
    drafter = shutil.copytree(world / "model", tmp_path / "drafter")
    return {"MODEL": str(world / "model"), "DRAFTER": str(drafter)}


def driven(
    fork: str, text: str, folder: Path, variables: dict[str, str], *more: str, wanted: tuple[str, ...] = ()
) -> Any:
    """Migrate a script, change its command line as the command says, and give it to verl's driver."""
    for name, value in variables.items():
        text = text.replace(f"${name}", value)
    run = folder / "run.sh"
    run.write_text(text)
    given = migrate.read([str(run)])
    said = migrate.Outcome(migrate._table()[fork], given)
    kept = {
        name: f"{name}={value}" for name, value in given.items() if "." in name and name not in said.take_out
    }
    changed = {path.lstrip("+"): f"{path}={value}" for path, value in said.verl.items()}
    config = folder / "flashpatch.toml"
    config.write_text(said.text(fork))
    overrides = [*{**kept, **changed}.values(), *more]
    names = ",".join(said.enable)
    return said, *validated(overrides, folder, wanted, FLASHPATCH=names, FLASHPATCH_CONFIG=str(config))


def test_flashrl(tmp_path: Path, folders: dict[str, str]) -> None:
    wanted = ("algorithm.rollout_correction.rollout_is", "critic.fsdp.param_offload", "reward.reward_kwargs")
    said, found, _ = driven("flashrl", FLASHRL, tmp_path, folders, wanted=wanted)
    correction, offload, kwargs = found["settings"].values()
    assert (correction, offload) == ("token", False)
    assert kwargs == {
        "overlong_buffer_cfg": {"enable": True, "len": 512, "penalty_factor": 1.0},
        "max_resp_len": 2048,
    }
    assert not said.lost


def test_fastrl(tmp_path: Path, folders: dict[str, str]) -> None:
    wanted = (f"{ROLLOUT}.engine_kwargs.sglang", f"{ROLLOUT}.mode")
    said, found, _ = driven("fastrl", FASTRL, tmp_path, folders, wanted=wanted)
    sglang, mode = found["settings"].values()
    assert (sglang["speculative_num_draft_tokens"], sglang["speculative_draft_model_path"]) == (
        48,
        folders["DRAFTER"],
    )
    assert mode == "async" and not said.lost


def test_flowrl(tmp_path: Path, folders: dict[str, str]) -> None:
    wanted = (f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.optim.lr_warmup_steps", f"{ACTOR}.optim.lr")
    said, found, _ = driven("flowrl", FLOWRL, tmp_path, folders, wanted=wanted)
    assert list(found["settings"].values()) == [
        "flowrl",
        10,
        1e-6,
    ]  # 10 is the paper's, which the script left out
    assert not said.lost


def test_async_grpo(tmp_path: Path, folders: dict[str, str]) -> None:
    more = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4", "data.train_files=t.parquet")
    wanted = (f"{ACTOR}.policy_loss.loss_mode", "trainer.v1.trainer_mode", f"{ACTOR}.optim.lr_scheduler_type")
    said, found, _ = driven("async-grpo", ASYNC_GRPO, tmp_path, folders, *more, wanted=wanted)
    assert list(found["settings"].values()) == ["grpo_exact", "stream_async", "constant"]
    assert [line.partition(":")[0] for line in said.lost] == ["GPUs that generate"]


def test_what_moved_is_where_verl_has_it() -> None:
    """Old places are not in verl's configuration, and new ones are."""
    import verl
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)

    def there(path: str) -> bool:
        node: Any = config
        for key in path.strip(".").split("."):
            if not isinstance(node, dict) or key not in node:
                return False
            node = node[key]
        return True

    for old, action in migrate._table()["verl"]["settings"].items():
        if action.get("keep") or old == f"{ROLLOUT}.mode":  # of which one value is left
            continue
        new = next(iter(action.get("verl", {"+": ""}))).removesuffix(".{rest}")
        assert not there(old.removesuffix("*")) and (new.startswith("+") or there(new)), (old, new)
