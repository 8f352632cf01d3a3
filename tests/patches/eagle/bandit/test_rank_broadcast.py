"""Two ranks with different clocks: alone they come apart, with `RankBroadcast` they run the same arms."""

import json
import os
import textwrap

import pytest
import warm
from machine import limit

pytest.importorskip("torch")

CODE = """
import json, os, sys
import torch.distributed as dist
from flashpatch.errors import PatchError
from flashpatch.patches.eagle.bandit.rank_broadcast import RankBroadcast
from flashpatch.patches.eagle.bandit.policy import Policy
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
def drive(broadcast):
    policy = Policy(["disable", "1_1_2", "3_1_4", "5_1_6"], broadcast=broadcast)
    arms = []
    for step in range(240):
        batch = 1 + step % 3
        arm = policy.select(batch)
        # To rank 0 drafting is dear, to rank 1 it costs nothing.
        policy.update(batch, arm, batch * (1 + 0.8 * arm.steps), 1.0 + (1.0 - rank) * arm.steps)
        arms.append(str(arm))
    return arms
said = {"alone": drive(None), "agreed": drive(RankBroadcast())}
policy = Policy(["disable", "3_1_4"], broadcast=RankBroadcast())
try:
    policy.select(2 + rank)
    said["apart"] = ""
except PatchError as error:
    said["apart"] = str(error)
print(json.dumps(said))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_with_different_clocks_run_the_same_arms(tmp_path):
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = warm.run_together(
        warm.TORCH,
        [(["-c", textwrap.dedent(CODE), str(rank), f"file://{tmp_path}/meet"], env) for rank in range(2)],
        cwd=tmp_path,
        timeout=limit(300),
    )
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr[-2000:] for rank in done]
    first, second = (json.loads(rank.stdout.splitlines()[-1]) for rank in done)
    assert first["alone"] != second["alone"]
    assert first["agreed"] == second["agreed"]
    assert first["agreed"].count("disable") > 150
    assert first["apart"] == "" and "step 1 with batch 3" in second["apart"]
