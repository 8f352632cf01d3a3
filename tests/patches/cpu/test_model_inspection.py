"""vLLM looks at a model's class in this process, where the cpu family is on, and finds the same."""

import json

import cpu_lab
import pytest
import warm

pytestmark = pytest.mark.verl

CODE = """
    import json, os, subprocess
    from vllm.model_executor.models import registry
    from flashpatch import engine
    started = []
    real = subprocess.run
    def run(command, *args, **kwargs):
        started.extend([1] * (command == registry._SUBPROCESS_COMMAND))
        return real(command, *args, **kwargs)
    subprocess.run = run
    print("FOUND", repr(registry.ModelRegistry.models[{name!r}].inspect_model_cls()))
    print("STARTED", len(started))
    patch = engine.statuses().get("cpu.vllm.run_in_subprocess")
    print("PATCH", patch and (patch.state.word, patch.calls))
"""


def inspect(folder, name: str, families: str) -> dict[str, list[str]]:
    folder.mkdir()
    on = {"FLASHPATCH": families} if families else {}
    code = CODE.format(name=name)
    done = cpu_lab.checked(code, folder, imported=warm.VERL_VLLM, VLLM_CACHE_ROOT=str(folder / "vllm"), **on)
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        word, _, rest = line.partition(" ")
        lines.setdefault(word, []).append(rest)
    return lines


@pytest.mark.full
@pytest.mark.parametrize("model", ["MambaForCausalLM", "Qwen2ForCausalLM"])
def test_no_process_is_started_and_the_same_is_found(tmp_path, model):
    ours, stock = inspect(tmp_path / "ours", model, "cpu"), inspect(tmp_path / "stock", model, "")
    assert ours["STARTED"] == ["0"] and stock["STARTED"] == ["1"]
    assert ours["FOUND"] == stock["FOUND"] and len(ours["FOUND"]) == 1
    assert ours["PATCH"] == [str(("live", 1))]
    kept = [sorted((tmp_path / name / "vllm" / "modelinfos").iterdir()) for name in ("ours", "stock")]
    assert [json.loads(p.read_text()) for p in kept[0]] == [json.loads(p.read_text()) for p in kept[1]]


def test_a_class_that_cannot_be_imported_is_said_to_be_so(tmp_path):
    done = cpu_lab.python(
        """
        from vllm.model_executor.models import registry
        model = registry._LazyRegisteredModel("nowhere.at_all", "Model")
        try:
            model.inspect_model_cls()
        except ModuleNotFoundError as error:
            print("raised", error.name)
        assert registry._try_inspect_model_cls("Model", model) is None
        """,
        tmp_path,
        imported=warm.VERL_VLLM,
        FLASHPATCH="cpu",
    )
    assert done.returncode == 0 and "raised nowhere" in done.stdout, cpu_lab.tail(done)
