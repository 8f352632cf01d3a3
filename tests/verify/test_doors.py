"""Every function of an engine by which weights can be written is on docs/reference/doors.md; a new one fails here."""

import importlib.util
from pathlib import Path

import doors
import pytest

VLLM, SGLANG = doors.named("vLLM"), doors.named("SGLang")


@pytest.mark.vllm
def test_the_installed_vllm_has_no_door_that_is_not_in_the_table() -> None:
    root = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
    found = doors.of_vllm(root)
    assert {"rpc reload_weights", "backend nccl", "v1.worker.gpu_worker:Worker.wake_up"} <= found
    assert not found - set(VLLM), "say on docs/reference/doors.md what becomes of it"


@pytest.mark.sglang
def test_the_installed_sglang_has_no_door_that_is_not_in_the_table() -> None:
    root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    found = doors.of_sglang(root)
    assert "request UpdateWeightsFromTensorReqInput" in found
    assert "utils.weight_checker:WeightChecker._reset_tensors" in found
    assert not found - set(SGLANG), "say on docs/reference/doors.md what becomes of it"


@pytest.mark.parametrize("table", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_each_door_has_a_fate(table: dict[str, str]) -> None:
    assert set(table.values()) == {"followed", "refused", "cannot happen", "unseen"}
    assert not {name.partition(" ")[2] for name in table} & doors.HARMLESS


WRITES = (
    *("param.copy_(x)", "param[:2] = x", "param.set_(x)"),
    *("p.data = x", "p.data[:] = x", "p.data += x", "p.data.mul_(x)", "p.data.copy_(x)"),
    "torch.utils.swap_tensors(p, x)",
    "torch._foreach_copy_([p], [x])",
    "torch.distributed.broadcast(p.data, 0)",
    "setattr(p, 'data', x)",
    "getattr(model, 'load_weights')(x)",
    "load = model.load_weights",
    "pool.submit(model.load_weights, x)",
)
READS = (
    "x = param[0]",
    "x = p.data",
    "buffer.copy_(param)",
    "self.data['n'] = x",
    "self.name = param",
    "param = x",
)


def test_each_way_to_write_a_parameter_is_found_and_reading_one_is_not(tmp_path: Path) -> None:
    sources = {
        f"v1/worker/{name}.py": "\n".join(
            f"def f{number}(p, param, x, model, pool):\n    {code}" for number, code in enumerate(forms)
        )
        for name, forms in (("write", WRITES), ("read", READS))
    }
    for name in ("worker_base", "gpu_worker", "cpu_worker"):
        sources[f"v1/worker/{name}.py"] = ""
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = doors.of_vllm(tmp_path)
    assert found == {f"v1.worker.write:f{number}" for number in range(len(WRITES))}
