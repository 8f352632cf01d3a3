"""Take over FlashRL's variables, YAML files, commands in scripts, and pickled profiles."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashpatch import user_directories
from flashpatch.errors import PatchError
from flashpatch.migration.given import Call, Given, plain_yaml
from flashpatch.migration.plan import Plan
from flashpatch.patches._shared import verl_moved
from flashpatch.patches.fp8.calibration import untrusted
from flashpatch.patches.fp8.precision import flashrl_compat, fleet

HELP = "FlashRL: flash-llm-rl, and the flash-rl branches of verl"

CONFIG, LM_HEAD, LEVEL = "FLASHRL_CONFIG", "FLASHRL_LMHEAD_FP32", "FLASHRL_LOGGING_LEVEL"
SGLANG = "SGLANG_PATCH"
PRECISIONS: Mapping[str, str] = {**fleet.FLASHRL_NAMES, **dict.fromkeys(fleet.FLASHRL_REFUSED, "int8")}
"""FlashRL's names to precisions. A job refuses its int8 names; here the difference is told instead."""
ACTOR = "actor_rollout_ref.actor"
CAPS = tuple(f"{ACTOR}.{name}" for name in ("tis_imp_ratio_cap", "imp_ratio_cap", "behav_imp_weight_cap"))
OWN = {
    "load_format": "the engine loads as verl tells it",
    "distributed_executor_backend": "engines are started as verl starts them",
    "module_attribute_to_preserve": "what a layer holds is found by comparing, not by name",
    "params_to_ignore": "what a layer holds is found by comparing, not by name",
}
"""Keys of an entry that steer FlashRL's own machinery, and what there is instead."""


def migrate(given: Given, plan: Plan) -> None:
    """Fill the plan from what was given.

    Raises:
        PatchError: a profile that holds more than plain data, or a file that is no profile.
    """
    written = _written(given, plan)
    _variables(given, plan)
    entries = list(_entries(given, plan, written))
    _precisions(entries, plan)
    while given.files:
        _profile(given.files.pop(0), plan)
    corrected = verl_moved.rollout_correction(given, plan, CAPS)
    if corrected is False:
        plan.option(
            "fp8", "tis", "off", next(given.overrides[name] for name in CAPS if name in given.overrides)
        )
    verl_moved.apply(given, plan)


def _variables(given: Given, plan: Plan) -> None:
    """Take over every variable but FLASHRL_CONFIG."""
    environ = {name: setting.value for name, setting in given.variables.items()}
    for found in flashrl_compat.counterparts(environ):
        if found.variable == CONFIG or found.value in ("", "0"):
            continue
        setting = given.variables[found.variable]
        if found.variable == LM_HEAD:
            plan.option("fp8", "lm_head", "float32", setting)
        elif found.variable == LEVEL:
            plan.do_otherwise(
                setting, f"export FLASHPATCH_LOG={setting.value}; the root logger is left alone"
            )
        elif found.mapped:
            plan.do_otherwise(setting, found.how)
        else:
            plan.lose(setting, found.how)
    if SGLANG in given.variables:
        plan.do_otherwise(given.variables[SGLANG], "not needed: whichever engine is imported is patched")


def _written(given: Given, plan: Plan) -> dict[str, list[Mapping[str, Any]]]:
    """Return the entries that ``flashrl setup`` in a script would write, by file; note its other commands."""
    files: dict[str, list[Mapping[str, Any]]] = {}
    for call in given.calls:
        if call.program != "flashrl" or not call.plain:
            continue
        if call.plain[0] == "setup":
            path = _argument(call, "-o", "--config-output") or "~/.flashrl_config.yaml"
            held = files.setdefault(path, []) if {"-a", "--append"} & call.arguments.keys() else []
            files[path] = [*held, _entry_of(call, given)]
        elif call.plain[0] == "profile":
            plan.do_otherwise(f"flashrl profile ({call.place})", _profile_command(call))
        elif call.plain[0] == "cleanup":
            plan.do_otherwise(
                f"flashrl cleanup ({call.place})", "run it once more, or 'pip uninstall flash-llm-rl'"
            )
    return files


def _entry_of(call: Call, given: Given) -> dict[str, Any]:
    entry: dict[str, Any] = {"fn": _argument(call, "--fn") or "int8"}
    for key, names in {"model": ("-m", "--model"), "profile": ("-p", "--profile")}.items():
        if value := _argument(call, *names):
            entry[key] = value
    for name, setting in list(given.overrides.items()):  # its further parameters, key=value
        if setting.place == call.place and "." not in name:
            entry[name] = given.overrides.pop(name).value
    return entry


def _argument(call: Call, *names: str) -> str:
    return next((call.arguments[name].value for name in names if name in call.arguments), "")


def _profile_command(call: Call) -> str:
    model = _argument(call, "-m", "--model") or "BF16"
    quantized = _argument(call, "-q", "-qm", "--quantized") or "Q"
    output = Path(_argument(call, "-o", "--output") or "profile.pt").with_suffix(".safetensors")
    words = ("flashpatch", "profile", "--model", model, "--quantized", quantized, "-o", str(output))
    return f"{shlex.join(words)}, then profile = {str(output)!r} (absolute) in [fp8]; only int8 uses it"


def _entries(
    given: Given, plan: Plan, written: Mapping[str, list[Any]]
) -> Iterator[tuple[Mapping[Any, Any], str]]:
    """Yield what is to run on replicas in turn, each entry with its place."""
    for path, data in given.documents.items():
        configs = data.get("configs") if isinstance(data, dict) else None
        if configs is not None:
            yield from _listed(configs, str(path))
    setting = given.variables.get(CONFIG)
    value = setting.value.strip() if setting else ""
    if setting is None or not value:
        if not given.documents:
            for path, listed in written.items():
                yield from _listed(listed, f"flashrl setup -o {path}")
    elif value in PRECISIONS:
        if value in fleet.FLASHRL_REFUSED:
            plan.do_otherwise(setting, f"unset it: a job with FLASHPATCH=int8 refuses the name {value}")
        yield {"fn": value}, str(setting)
    elif value in written:
        yield from _listed(written[value], str(setting))
    elif (file := Path(user_directories.expand(value))).is_file():
        if file not in given.documents:
            data = plain_yaml(untrusted.text(file, 1 << 20), file)
            yield from _listed(data.get("configs") if isinstance(data, dict) else None, str(file))
    elif not any(isinstance(data, dict) and "configs" in data for data in given.documents.values()):
        plan.lose(setting, "neither a precision of FlashRL nor a file here; give the YAML file as FILE")


def _listed(configs: Any, where: str) -> Iterator[tuple[Mapping[Any, Any], str]]:
    if not isinstance(configs, list) or not configs or not all(isinstance(entry, dict) for entry in configs):
        raise PatchError(
            f"{where} has no list 'configs' of mappings.",
            patch="fp8",
            advice="Give the file that 'flashrl setup' wrote.",
        )
    yield from ((entry, f"entry {number} of {where}") for number, entry in enumerate(configs))


def _precisions(entries: list[tuple[Mapping[Any, Any], str]], plan: Plan) -> None:
    """Switch on the precision of a single entry, or a fleet of several."""
    precisions = []
    for entry, where in entries:
        name = entry.get("fn", "int8")
        if name not in PRECISIONS:
            plan.lose(f"fn={name!r} in {where}", f"of FlashRL's names {', '.join(PRECISIONS)} are known")
            continue
        precision = PRECISIONS[name]
        precisions.append(precision)
        _differences(name, precision, entry, where, plan)
    if len(precisions) > 1:
        plan.enable("fp8")
        plan.option("fp8", "fleet", [{"precision": precision} for precision in precisions], "configs")
    elif precisions:
        plan.enable(precisions[0])
    elif not entries:
        plan.lose(CONFIG, "not set, so FlashRL does nothing, and nothing is switched on here")


def _differences(name: str, precision: str, entry: Mapping[Any, Any], where: str, plan: Plan) -> None:
    if name == "int8_prune":
        plan.lose(
            f"fn=int8_prune in {where}", "channels that no layer reads are not pruned; int8 it is, unpruned"
        )
    for key, value in entry.items():
        what = f"{key}={value!r} in {where}"
        if key == "fn" or value is None or (key == "quantization" and value == "fp8" and precision != "bf16"):
            continue
        if key in OWN:
            plan.do_otherwise(what, OWN[key])
        elif key == "model" and precision != "bf16":
            plan.do_otherwise(
                what, "no quantized checkpoint is needed: the trainer's own weights are rounded"
            )
        elif key == "profile" and precision == "int8":
            path = Path(str(value)).with_suffix(".safetensors")
            words = ("flashpatch", "profile", "--model", "BF16", "--flashrl", str(value), "-o", str(path))
            plan.do_otherwise(
                what,
                f"{shlex.join(words)}, then profile = {str(path)!r} (absolute) in [fp8]; unsmoothed without",
            )
        elif key == "profile" and precision != "bf16":
            plan.do_otherwise(what, "not needed: the engine quantizes every linear layer but lm_head")
        else:
            plan.lose(what, "no counterpart; set it in the training script (rollout.engine_kwargs.vllm)")


def _profile(path: Path, plan: Plan) -> None:
    """Look into a pickled profile, and say how to convert it."""
    from flashpatch.patches.fp8.calibration import pickled

    form, number = pickled.facts(path)
    words = (
        "flashpatch",
        "profile",
        "--model",
        "BF16",
        "--flashrl",
        str(path),
        "-o",
        f"{path.stem}.safetensors",
    )
    if form != "int8":
        plan.do_otherwise(path.name, f"names {number} weights that were {form}; not needed here")
        return
    plan.do_otherwise(
        path.name,
        f"scales of {number} tensors for int8; with the bf16 model it was made for, {shlex.join(words)}, then "
        "profile = its absolute path in [fp8]",
    )
