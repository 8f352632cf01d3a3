"""verl's servers, one of them killed and started again: those that verl's checkpoint manager holds answer after a sync, and not
before, in Ray and at their HTTP address; one that no manager holds answers at once.

verl 0.9.1 itself starts no server again, and lets Ray start none: a server that Ray did would have no engine."""

import json

import cpu_lab
import pytest
import warm

pytestmark = [pytest.mark.verl, pytest.mark.full]  # over 100 s
CODE = """
import asyncio, json, sys, urllib.request
import ray
from flashpatch.patches.grpo.streaming import replicas
from flashpatch.verify.probes import verl_actor

engine, *settings = json.loads(sys.argv[1])
config = verl_actor.configuration(settings)
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.rollout.llm_server import LLMServerManager

async def answered(replica):
    try:
        asked = dict(temperature=0.0, max_tokens=8)
        return bool((await replica.server_handle.generate.remote([5, 6, 7], asked, "0")).token_ids)
    except Exception as error:
        return str(error)

COMPLETIONS = "v1/completions", dict(model=config.actor_rollout_ref.model.path, prompt=[5, 6, 7], max_tokens=4)
OWN = dict(sglang=("generate", dict(input_ids=[5, 6, 7])))  # verl's SGLang has no tokenizer, which the other needs to answer

def posted(replica, path, asked):
    url = f"http://{replica.server_address}/{path}"
    request = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode()]

async def seen(manager):
    [first] = manager.get_replicas()
    yield await answered(first)
    sent = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    sync = CheckpointEngineManager(config=sent, actor_wg=None, replicas=[first])
    yield await answered(first)
    yield await asyncio.to_thread(posted, first, *COMPLETIONS)
    await first.server_handle.set_global_steps.remote(3)
    yield await answered(first)
    yield await asyncio.to_thread(posted, first, *OWN.get(engine, COMPLETIONS))
    again = await asyncio.to_thread(replicas._another, manager, first)
    yield await answered(again)
    yield await asyncio.to_thread(posted, again, *COMPLETIONS)
    await again.server_handle.set_global_steps.remote(4)
    yield await answered(again)
    restarted = again.server_class.options(max_restarts=1, max_task_retries=1).remote(**dict(
        config=again.config, model_config=again.model_config, rollout_mode=again.rollout_mode, workers=[], replica_rank=1,
        node_rank=0, nnodes=1, cuda_visible_devices="", **{"gpus_per_node": 1} if engine == "vllm" else {"base_gpu_id": 0}))
    await restarted.__ray_ready__.remote()
    ray.kill(restarted, no_restart=False)
    again._server_handle = restarted
    yield await answered(again)

async def main(manager):
    print("FOUND" + json.dumps([one async for one in seen(manager)]))

validate_config(config, False, False)
ray.init(num_cpus=16, num_gpus=1, include_dashboard=False, object_store_memory=200_000_000)
asyncio.run(main(LLMServerManager.create(config)))  # verl sees by its source whether a caller awaits it
ray.shutdown()
"""
OWN = """
actor_rollout_ref.hybrid_engine=False actor_rollout_ref.actor.use_dynamic_bsz=True trainer.v1.trainer_mode=separate_async
trainer.n_gpus_per_node=1 algorithm.adv_estimator=grpo actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=33554432
""".split()
ROLLOUT = """
prompt_length=32 response_length=16 max_model_len=64 gpu_memory_utilization=0.1 max_num_seqs=8 max_num_batched_tokens=512
tensor_model_parallel_size=1 load_format=auto enforce_eager=True nnodes=1 n_gpus_per_node=1 agent.num_workers=1
""".split()
FIRST = "the server of replica 0 has had no weights from its trainer since it was started"


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.sglang)])
def test_a_server_answers_after_its_first_sync(world, tmp_path, engine):
    settings = [engine, f"actor_rollout_ref.model.path={world}/model", *OWN]
    settings += [f"actor_rollout_ref.rollout.{one}" for one in (f"name={engine}", *ROLLOUT)]
    imported = warm.VERL_SGLANG if engine == "sglang" else warm.VERL
    names = dict(FLASHPATCH="cpu,bf16", SGLANG_USE_CPU_ENGINE="1")  # the second is set by verl's own command
    done = cpu_lab.checked(CODE, tmp_path, imported=imported, arguments=[json.dumps(settings)], **names)
    [found] = [line[5:] for line in done.stdout.splitlines() if line.startswith("FOUND")]
    alone, before, refused, after, served, again, refused_again, synced, restarted = json.loads(found)
    assert alone is after is synced is True and served == 200, found
    for code, said in (refused, refused_again):
        assert code == 500 and FIRST in said, found
    assert FIRST in before and FIRST in again, found
    assert "has no attribute" in restarted, restarted
