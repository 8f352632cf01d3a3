"""Send weights to an engine as a trainer on the same device does, by vLLM's own `ipc` weight transfer."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import base, ipc_engine


def send(llm: vllm.LLM, checkpoint: Path) -> None:
    """Load a checkpoint into this process's CUDA memory, and let the engine's worker open it by its IPC handles.

    ``llm``: opened with ``weight_transfer_config={"backend": "ipc"}``, its worker in another process; ``checkpoint``: of a
    transformers model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).cuda()
    if hasattr(ipc_engine, "IPCTrainerWeightTransferEngine"):
        _as_a_trainer(llm, model)
    else:
        _as_in_024(llm, model)


def _as_a_trainer(llm: vllm.LLM, model: torch.nn.Module) -> None:
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: llm.init_weight_transfer_engine(
            base.WeightTransferInitRequest(init_info=info)
        ),
        start_weight_update=llm.start_weight_update,
        update_weights=lambda info: llm.update_weights(base.WeightTransferUpdateRequest(update_info=info)),
        finish_weight_update=llm.finish_weight_update,
    )
    trainer = ipc_engine.IPCTrainerWeightTransferEngine.trainer_init(
        ipc_engine.IPCTrainerInitInfo(rank=0), client=client, source=base.ModuleSource(model)
    )
    trainer.send_weights()


def _as_in_024(llm: vllm.LLM, model: torch.nn.Module) -> None:
    """Older ones leave start and end of an update to whoever trains, and send only what lies between."""
    how = {"send_mode": lambda info: llm.update_weights({"update_info": asdict(info)})}
    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    ipc_engine.IPCWeightTransferEngine.trainer_send_weights(model.named_parameters(), how)
    llm.finish_weight_update()
