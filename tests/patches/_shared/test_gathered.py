"""Between two syncs verl's asynchronous trainers put another policy's shards in place; what was gathered of the last one goes."""

import grpo_lab
import pytest

pytestmark = pytest.mark.verl

EXCHANGE = """
    import sys
    from types import SimpleNamespace
    from torch.distributed.fsdp import FullyShardedDataParallel
    from verl.experimental.separation.engine_workers import DetachActorWorker
    import flashpatch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    flashpatch.enable("{name}")
    worker = SimpleNamespace(config=SimpleNamespace(actor=SimpleNamespace(strategy="fsdp")), _strategy_handlers=None)
    save, restore = DetachActorWorker._get_strategy_handlers(worker)
    first, ids, update = save(model), torch.arange(8), torch.optim.SGD(model.parameters(), 1.0)
    wanted = model(ids).detach()
    model(ids).square().sum().backward()
    update.step()
    other = model(ids).detach()
    restore(model, first)
    print(float((other - wanted).abs().max()), float((model(ids) - wanted).abs().max()))
"""


@pytest.mark.parametrize("name", ["grpo", "flowrl", "fsdp"])
def test_a_policy_that_is_put_back_is_whole(tmp_path, name):
    for said in grpo_lab.ranks(EXCHANGE.format(name=name), tmp_path, 2):
        moved, away = map(float, said.strip().splitlines()[-1].split())
        assert moved > 0.1 and away == 0.0
