"""Drafts of verl's server of SGLang are counted per request."""

import asyncio
from types import SimpleNamespace


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

    server, zero = Server(), {"spec_num_draft_tokens": 9, "spec_num_accepted_tokens": 0}

    async def run():
        calls = [verl_sglang.generate(Server.generate, server, n, zero if n == 2 else {}) for n in range(3)]
        return [output.extra_fields for output in await asyncio.gather(*calls)]

    plain, also_plain, mtp = asyncio.run(run())
    assert plain == also_plain == {} and mtp == {"spec_num_draft_tokens": 6, "spec_num_accepted_tokens": 2}
    assert server.latest in range(3), "what generate() sets belongs to the server"
