"""The records on the installed verl and SGLang: contracts hold, undo restores the very objects, drafts are counted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import cpu_lab
import pytest
import warm

pytestmark = [pytest.mark.verl, pytest.mark.sglang]

CODE = """
import flashpatch
from flashpatch.arming.preflight import examine
from flashpatch.patches.eagle.verl_sglang import patches

for patch in patches:
    found = examine(patch)
    assert found.problem is None, (patch.id, found.problem)

flashpatch.enable("cpu", "bf16")
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer as server

before = dict(vars(server))
flashpatch.enable("eagle")
assert vars(server)["generate"] is not before["generate"]
assert {*vars(server)} - {*before} == {"flashpatch_eagle_call"}
flashpatch.disable("eagle")
assert {*vars(server)} == {*before} and all(vars(server)[name] is then for name, then in before.items())
"""


def test_contracts_hold_and_undo_restores_the_very_objects(tmp_path):
    done = cpu_lab.python(CODE, tmp_path, imported=warm.VERL_SGLANG, SGLANG_USE_CPU_ENGINE="1")
    assert done.returncode == 0, cpu_lab.tail(done)


class Server:
    """A server whose requests run at once, each with counts of its own."""

    def __init__(self):
        self.tokenizer_manager = self

    async def generate_request(self, number, unused):
        await asyncio.sleep(0.01 * (3 - number))
        names = ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct")
        yield {"meta_info": dict(zip(names, (3 * number, number, number), strict=True)) if number else {}}

    async def generate(self, number, fields):
        self.latest = number
        await self.tokenizer_manager.generate_request(number, None).__anext__()
        return SimpleNamespace(extra_fields=dict(fields))


def test_drafts_are_counted_per_request_under_sglangs_names():
    from flashpatch.patches.eagle import verl_sglang
    from flashpatch.patches.eagle.drafter_refit import commands

    server, zero = Server(), {"spec_num_draft_tokens": 9, "spec_num_accepted_tokens": 0}

    async def run():
        calls = [verl_sglang.generate(Server.generate, server, n, zero if n == 2 else {}) for n in range(3)]
        return [output.extra_fields for output in await asyncio.gather(*calls)]

    plain, also_plain, mtp = asyncio.run(run())
    assert plain == also_plain == {} and mtp == {"spec_num_draft_tokens": 6, "spec_num_accepted_tokens": 2}
    assert server.latest in range(3), "what generate() sets belongs to the server"
    assert verl_sglang.take(server) == {
        commands.REQUESTS: 2,
        commands.ACCEPT_RATE: pytest.approx(1 / 3),
        commands.ACCEPT_LENGTH: 2.0,
    }
    assert verl_sglang.take(server) == {}
