"""Kept ids stay with their tokens through verl's own client, agent loop and sample, also if a request is resumed."""

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl

PREPARED = """
import asyncio, pickle
from types import SimpleNamespace
import numpy, torch
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput
from flashpatch.patches.fp8.support.kept import Drawn
def served(*tokens, stop="completed"):
    "What a server returns, after a journey over Ray: token t was drawn from t and t + 100."
    output = TokenOutput(token_ids=list(tokens), stop_reason=stop)
    output.log_probs = [Drawn(-t / 10, numpy.array([t, t + 100], dtype=numpy.int32)) for t in tokens]
    return pickle.loads(pickle.dumps(output))
def sample(ids, mask, logprobs):
    made = AgentLoopOutput(prompt_ids=[1, 2], response_ids=ids, response_mask=mask, response_logprobs=logprobs,
                           metrics=AgentLoopMetrics())
    return made.as_dict()
"""


def scenario(code: str, folder, config: str) -> None:
    code = PREPARED + RESUMED_AND_TOOLS + code
    cpu_lab.checked(code, folder, imported=warm.VERL_VLLM, FLASHPATCH="cpu,bf16", config=config)


RESUMED_AND_TOOLS = """
parts = [served(11, 12, stop="aborted"), served(13)]
async def once(self, **arguments):
    return parts.pop(0)
llm_server.LLMServerClient.generate = once  # the engine, which is paused once
config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(response_length=8)))
client = llm_server.FullyAsyncLLMServerClient(config, None)
first = asyncio.run(client.generate("a", prompt_ids=[1, 2], sampling_params={}))
assert first.token_ids == [11, 12, 13], first
align = ContinuousTokenBuilder.align_response_metadata
def merge(kind, appended):
    return SimpleNamespace(kind=kind, removed_prefix_token_count=0, inserted_token_ids=[], appended_token_count=appended)
mask, logs = align(None, merge("assistant", 3), [], [], assistant_logprobs=first.log_probs)
mask, logs = align(None, merge("context", 2), mask, logs)  # what a tool answered
mask, logs = align(None, merge("assistant", 2), mask, logs, assistant_logprobs=served(21, 22).log_probs)
ids = [11, 12, 13, 50, 51, 21, 22]
"""


def test_ids_stay_with_their_tokens(tmp_path):
    scenario(
        """
fields = sample(ids[:6], mask[:6], logs[:6])  # cut to the length of a response
assert fields["response_mask"].tolist() == [1, 1, 1, 0, 0, 1]
assert fields["kept_ids"].dtype == torch.int32
assert fields["kept_ids"].tolist() == [[t, t + 100, -1] if t not in (50, 51) else [-1] * 3 for t in ids[:6]]
assert torch.equal(fields["rollout_log_probs"], torch.tensor([float(x) for x in logs[:6]]))

batch = list_of_dict_to_tensordict([fields, sample([11], [1], [-0.5])])  # a loop with numbers of its own
assert batch["kept_ids"].unbind()[1].tolist() == [[-1] * 3]
""",
        tmp_path,
        "[fp8]\nsupport = 3\n",
    )


def test_without_the_option_samples_are_verl_s(tmp_path):
    scenario(
        """
assert "kept_ids" not in sample(ids, mask, logs)
import flashpatch
assert "__init__" in vars(AgentLoopOutput)
flashpatch.disable("bf16")
assert "__init__" not in vars(AgentLoopOutput) and "__wrapped__" not in vars(AgentLoopOutput.as_dict)
assert sample(ids, mask, logs)["responses"].tolist() == ids
""",
        tmp_path,
        "[fp8]\n",
    )
