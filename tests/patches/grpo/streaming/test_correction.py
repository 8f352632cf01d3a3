"""Importance weights of a round are those of the whole batch, also if none of its responses is within IcePop's bounds."""

import json
import math

import pytest

pytestmark = pytest.mark.verl
CODE = """
import json, torch, verl.workers.engine_workers
from tensordict import TensorDict
from flashpatch.patches.grpo.streaming.step import CurrentPolicy
new, drawn = [[-1.0, -1.0, -1.0, 0.0]] * 2, [[-1.0, -1.1, -1.0], [-2.0, -1.5, -1.0]]
def nested(rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
seen = []
for rows, mask in ([0, 1], 1), ([1], 1), ([0], 0):
    data = {"rollout_log_probs": nested([drawn[i] for i in rows]), "response_mask": nested([[mask] * 3 for i in rows])}
    data = TensorDict(data, batch_size=len(rows))
    policy = CurrentPolicy({"rollout_is": "sequence", "rollout_is_threshold": "0.5_2.0"}, False)
    policy({"log_probs": nested([new[i] for i in rows])}, data)
    seen.append(data["rollout_is_weights"].to_padded_tensor(0.0).tolist())
print(json.dumps(seen))
"""


def test_a_round_outside_of_the_bounds_has_no_weight(scenario):
    near, far = [pytest.approx(math.exp(0.1))] * 3, [0.0] * 3
    assert json.loads(scenario(CODE).splitlines()[-1]) == [[near, far], [far], [far]]
