"""What an engine's metrics say of its load, and what the balancer makes of it."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from grpo_balancer import balancer
from machine import limit

from flashpatch.patches.grpo.routing.engine_load import EngineLoad, ask, parse

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 32.0
vllm:num_requests_running{engine="1",model_name="m"} 30.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.98
"""


def test_both_engines_metrics_are_read():
    assert parse(VLLM) == EngineLoad(62, 2)
    sglang = 'sglang:num_running_reqs{tp_rank="0"} 7.0\nsglang:num_queue_reqs{tp_rank="0"} 1\n'
    assert parse(sglang) == EngineLoad(7, 1) and parse("python_info 1.0\n") is None


def test_a_full_engine_gets_no_more_and_strangers_count():
    class Answer(BaseHTTPRequestHandler):
        text = VLLM

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    name = f"127.0.0.1:{server.server_port}"

    async def scenario():
        assert await ask(name) == EngineLoad(62, 2) and await ask("127.0.0.1:1") is None
        ours = balancer("", engine_metrics=0.05)
        await ours.add_servers({name: "A", "none": "B"})
        assert (await ours.acquire_server("1", prompt_digest=(1, 10)))[0] == name
        while not ours._pool.workers[name].room:
            await asyncio.sleep(0.01)
        # 64 are there and one of them is ours: the others count, and 62 generate at once.
        worker = ours._pool.workers[name]
        assert worker.room == 66 and worker.others > 63 * 50 and ours._pool.workers["none"].others == 0
        assert {(await ours.acquire_server(str(one), prompt_digest=(one, 10)))[0] for one in (2, 3)} == {
            "none"
        }
        Answer.text = VLLM.replace("62.0", "0.0").replace("2.0", "0.0").replace("3", "0")
        while worker.room or worker.others:
            await asyncio.sleep(0.01)
        assert worker.tokens == sum(worker.requests.values())
        ours._watch.cancel()

    try:
        asyncio.run(asyncio.wait_for(scenario(), limit(60)))
    finally:
        server.shutdown()
