"""Send a CPU tensor with SGLang's ``update_weights`` to a process that unpickles it; print what became of it."""

import asyncio
import os
import subprocess
import sys

import torch
from sglang.srt.weight_sync import utils
from torch.distributed.device_mesh import init_device_mesh

READ = """
import sys
from sglang.srt.utils import MultiprocessingSerializer
[(name, values)] = MultiprocessingSerializer.deserialize(sys.stdin.buffer.read())
print("arrived:", name, values.get(0).tolist())
"""


class Server:
    """What SGLang's server does with a request, in a process that shares nothing with this one."""

    async def update_weights_from_tensor(self, request):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASHPATCH")}
        payload = request.serialized_named_tensors[0]
        done = subprocess.run([sys.executable, "-c", READ], input=payload, capture_output=True, env=clean)
        return (done.stdout + done.stderr).decode()


torch.distributed.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
tensor = torch.arange(6.0)
try:
    print(asyncio.run(utils.update_weights(Server(), [("w", tensor)], "tp", mesh)))
except Exception as error:
    print(f"{type(error).__name__}: {error}")
print("shared memory:", tensor.untyped_storage().is_shared())
