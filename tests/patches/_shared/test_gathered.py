"""verl's asynchronous trainers save copies of a policy's shards, and put them back with nothing left gathered of another policy."""

import grpo_lab
import pytest

pytestmark = pytest.mark.verl

EXCHANGE = """
    from types import SimpleNamespace
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from verl.experimental.separation.engine_workers import DetachActorWorker
    import flashpatch
    torch.manual_seed(0)
    one, two = (torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)) for _ in range(2))
    fully_shard(two[1], mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    flashpatch.enable("{name}")
    for strategy, model in ("fsdp", FullyShardedDataParallel(one, device_id=torch.device("cpu"))), ("fsdp2", two):
        worker = SimpleNamespace(config=SimpleNamespace(actor=SimpleNamespace(strategy=strategy)), _strategy_handlers=None)
        save, restore = DetachActorWorker._get_strategy_handlers(worker)
        first, ids, update = save(model), torch.arange(8), torch.optim.SGD(model.parameters(), 1.0)
        wanted = model(ids).detach()
        model(ids).square().sum().backward()
        update.step()
        other = model(ids).detach()
        restore(model, *(first if strategy == "fsdp2" else [first]))
        moved, away = (float((now - wanted).abs().max()) for now in (other, model(ids)))
        assert moved > 0.1 and away == 0.0, (strategy, moved, away)
"""


@pytest.mark.parametrize("name", ["grpo", "flowrl", "fsdp", "cpu"])
def test_a_policy_that_is_put_back_is_whole(tmp_path, name):
    grpo_lab.ranks(EXCHANGE.format(name=name), tmp_path, 2)
