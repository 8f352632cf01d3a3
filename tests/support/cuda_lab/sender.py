"""Send weights to an engine as a trainer on the same device does, by vLLM's own `ipc` weight transfer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine


def send(llm: vllm.LLM, checkpoint: Path) -> None:
    """Load a checkpoint into this process's CUDA memory, and let the engine's worker open it by its IPC handles.

    Args:
        llm: opened with ``weight_transfer_config={"backend": "ipc"}``, its worker in another process.
        checkpoint: of a transformers model.
    """
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: llm.init_weight_transfer_engine(
            base.WeightTransferInitRequest(init_info=info)
        ),
        start_weight_update=llm.start_weight_update,
        update_weights=lambda info: llm.update_weights(base.WeightTransferUpdateRequest(update_info=info)),
        finish_weight_update=llm.finish_weight_update,
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda()
    trainer = IPCTrainerWeightTransferEngine.trainer_init(
        IPCTrainerInitInfo(rank=0), client=client, source=base.ModuleSource(model)
    )
    trainer.send_weights()
