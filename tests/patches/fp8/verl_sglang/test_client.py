"""verl's client in a trainer of a mixed fleet: it describes a server, and opens none."""

from pathlib import Path

import cpu_lab
import pytest
import sglang_lab
import warm

pytestmark = [
    pytest.mark.verl,
    pytest.mark.sglang,
    pytest.mark.skipif(
        sglang_lab.VERSION >= (0, 5, 19), reason="newer versions resolve arguments where an engine starts"
    ),
]

CODE = """
import flashpatch, pytest
flashpatch.enable("fp8", fleet=[{"precision": "bf16"}, {"precision": "int8"}])
from sglang.srt.server_args import ServerArgs
from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter
from flashpatch import ledger
client = AsyncHttpServerAdapter(model_path="dummy", host="127.0.0.1", port=1, launch_server=False)
assert client.server_args.quantization is None and client.server_args.port == 1
assert not ledger.notes().get("precision"), "the trainer noted an engine's precision"
with pytest.raises(flashpatch.PatchError, match="a fleet of several precisions needs replicas with numbers"):
    ServerArgs(model_path="dummy")
"""


def test_the_trainers_client_needs_no_number_of_a_replica(tmp_path: Path) -> None:
    cpu_lab.checked(CODE, tmp_path, imported=warm.VERL_SGLANG, SGLANG_USE_CPU_ENGINE="1")
