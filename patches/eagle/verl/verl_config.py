"""Check verl's configuration before anything starts, and add the drafter and its trainer's settings to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from flashpatch import engine, registry, user_directories
from flashpatch.arming.preflight import examine
from flashpatch.decorate import Patches
from flashpatch.errors import PatchError
from flashpatch.patches._shared.checkpoint_shapes import files, fingerprint
from flashpatch.patches._shared.verl_config import TARGET, Get, JobConfig, door, forbidden
from flashpatch.patches.eagle.bandit.arm import Arm
from flashpatch.patches.eagle.options import UNTIL_VERL
from flashpatch.patches.eagle.train.settings import WorkerSettings
from flashpatch.patches.eagle.verl import speculation
from flashpatch.patches.eagle.verl.speculation import ID, ROLLOUT, Dialect, Sglang, Speculation

logger = logging.getLogger("flashpatch.eagle")

MODEL, ACTOR = "actor_rollout_ref.model.path", "actor_rollout_ref.actor"
_OWN_LAYERS = "eagle_aux_hidden_state_layer_ids"
OURS = "flashpatch"
"""Key of ``engine_kwargs`` under which the job's other processes find the settings."""
IN_SGLANG = "eagle.sglang.verify"
"""A patch of the group for SGLang, which acts as a whole or not at all."""
NEW = {"new": "eagle", "new-eagle3": "eagle3"}
"""Values of the option ``drafter`` for one from scratch, and the method that it drafts with."""
DRAFT_TOKENS = 3
"""Drafts per step with the option ``drafter``, unless ``arms`` name larger ones."""
EAGLE3_LAYERS = 7
"""Fewest layers of a target whose inner states both engines give an EAGLE-3 drafter by default, after the second, middle
and third last layer: with fewer, two of the three are the same."""


def settings(rollout: Any) -> dict[str, Any] | None:
    """Return arguments of `flashpatch.patches.eagle.verl.cotraining.Job` from a rollout's config; None to train
    nothing."""
    found = (rollout.engine_kwargs or {}).get(OURS)
    return json.loads(found["eagle"]) if found else None


patches = Patches("eagle", "verl>=0.9", scope="driver", remove_when=UNTIL_VERL)


@patches.wrap(
    TARGET,
    relies_on="config.actor_rollout_ref.rollout",
    evidence="install",
    why="verl starts its engines with the configured speculation, by default none.",
)
def validate_config(original, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the rollout engine the drafter that the option names, made from scratch on demand, and log why a configured
    drafter cannot be trained.

    Raises PatchError if the configuration contradicts the family's options; all such settings are named."""
    job = JobConfig.open(config, ID)
    options = engine.options("eagle")
    if job.get(f"{ROLLOUT}.engine_kwargs.{OURS}"):  # another process of the job has done it
        return original(config, *args, **kwargs)
    dialect = speculation.of(job.get)
    job.refuse(
        [*refusals(job.get, options, dialect), *_engine_refusals(job.get, options)],
        "cannot run with",
        "Change these settings, or take eagle out of FLASHPATCH.",
    )
    WorkerSettings(
        "", "", "", **_trainer_settings(options)
    )  # refuses what is none, also where nothing is trained
    found = dialect.configured(job.get) if dialect else Speculation()
    if options["drafter"] in NEW:  # judged before one is written: without training it would stay random
        found = Speculation(NEW[options["drafter"]])
    elif options["drafter"]:
        found = _drafter(job.get, options, dialect)
    idle = list(remarks(job.get, options, dialect, found)) if options["cotrain"] else ["cotrain is off"]
    if not idle and not files(_target(job.get)):
        idle = [f"{MODEL}={job.get(MODEL)} has no safetensors files, here or on the hub"]
    if options["capture"] == "trainer":
        without = idle if idle else no_states(job.get, options, found)
        job.refuse(
            without, "eagle's option capture=trainer cannot be had:", "Change that, or leave the option out."
        )
    for reason in idle if found.method or not options["history"] else ():
        logger.warning("eagle trains no drafter: %s", reason)
    if options["drafter"] in NEW and idle:
        logger.warning(
            "eagle drafts nothing: drafter=%s is random as long as it is not trained", options["drafter"]
        )
        return original(config, *args, **kwargs)
    if options["drafter"] in NEW:
        found = _drafter(job.get, options, dialect)
    if options["drafter"]:
        for path, value in list(dialect.wanted(job.get, found, draft_tokens(options))):
            job.set(path, value, "eagle's option drafter")
    for path, value in list(dialect.needed(job.get, found)) if dialect else ():
        job.set(path, value, "so that the drafter keeps its weights")
    if not idle:
        from flashpatch.patches.eagle.train.export import check_round_trip

        check_round_trip(found.model, _target(job.get), found.method, dialect.engine)
        without = list(no_states(job.get, options, found))
        if without:
            source = f"states that the rollout engine captures ({'; '.join(without)})"
        else:
            source = "states of the trainer's pass for old log-probabilities"
        logger.warning("eagle trains its drafter on %s", source)
        told = json.dumps(training(job.get, options, dialect, found, from_trainer=not without))
        job.set(f"{ROLLOUT}.engine_kwargs.{OURS}", {"eagle": told}, reason=None)
    return original(config, *args, **kwargs)


door(patches)


def refusals(get: Get, options: Mapping[str, Any], dialect: Dialect | None) -> Iterator[str]:
    """Yield the settings that contradict the option ``drafter``, each with the reason."""
    if not options["drafter"]:
        return
    if dialect is None:
        yield f"{ROLLOUT}.name={get(f'{ROLLOUT}.name')} (eagle's option drafter is for vllm and sglang)"
    else:
        yield from dialect.conflicts(get, options["drafter"])
    yield from forbidden(get, {"actor_rollout_ref.model.mtp.enable": "verl's own drafter"})
    if options["drafter"] not in NEW and not (Path(options["drafter"]) / "config.json").exists():
        yield f"eagle's option drafter={options['drafter']} (no config.json there; new and new-eagle3 make a drafter)"


def _engine_refusals(get: Get, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the family cannot act in the rollout engine, which would end when it is opened or updated.

    A driver need not have the engine: it may be on a node of its own."""
    if get(f"{ROLLOUT}.name") != "sglang":
        return
    found = examine(registry.patch(IN_SGLANG))
    if found.installed is None:
        return
    if found.problem:
        yield f"{ROLLOUT}.name=sglang ({found.problem})"
    elif not engine.enabled("fp8") and (options["drafter"] or Sglang().configured(get).model):
        yield f"{ROLLOUT}.name=sglang without bf16, fp8 or int8 (verl loads the policy into the drafter too)"


def remarks(
    get: Get, options: Mapping[str, Any], dialect: Dialect | None, found: Speculation
) -> Iterator[str]:
    """Yield reasons why no drafter can be trained with this configuration."""
    if dialect is None:
        yield f"{ROLLOUT}.name={get(f'{ROLLOUT}.name')}; drafters are trained for vllm and sglang"
    elif found.method not in ("eagle", "eagle3"):
        yield (
            f"the rollout engine drafts with {found.method or 'nothing'}, which is not trained here; "
            "eagle's option drafter=new makes one that is"
        )
    elif not (Path(found.model) / "config.json").exists() and options["drafter"] not in NEW:
        yield f"{found.model or 'its drafter'} is not a folder with a config.json"
    elif dialect.engine == "sglang" and found.method == "eagle3":
        for why in no_states(get, options, found):
            yield f"SGLang hands out no last states for EAGLE-3, and states are not the trainer's: {why}"
    if dialect is not None:
        yield from dialect.remarks(get, found)
    mode = get("trainer.v1.trainer_mode")
    if mode in ("separate_async", "stream_async"):
        yield f"in trainer mode {mode} rollouts never pause"
    if get("rollout"):  # the trainers of verl.experimental have such a section
        yield "rollouts on devices of their own never pause"


def no_states(get: Get, options: Mapping[str, Any], found: Speculation) -> Iterator[str]:
    """Yield reasons why a drafter is not trained on states of the trainer's pass for old log-probabilities."""
    if options["capture"] == "engine":
        yield "eagle's option capture=engine"
    if options["samples"]:
        yield f"eagle's option samples={options['samples']} (what the engine captures, for a reader of yours)"
    yield from forbidden(get, {"algorithm.rollout_correction.bypass_mode": "there is no such pass"})
    if get(f"{ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        yield f"{ACTOR}.strategy={get(f'{ACTOR}.strategy')} (states are taken of FSDP actors alone)"
    for path in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        if (get(f"{ACTOR}.{path}") or 1) > 1:
            yield f"{ACTOR}.{path}={get(f'{ACTOR}.{path}')} (each rank has a part of a sequence)"
    config = Path(found.model) / "config.json"
    drafter = json.loads(config.read_text()) if config.exists() else {}
    if _OWN_LAYERS in {**drafter, **(drafter.get("eagle_config") or {})}:
        yield f"{_OWN_LAYERS} of the drafter (engines count them differently)"


def _drafter(get: Get, options: Mapping[str, Any], dialect: Dialect) -> Speculation:
    """Return the speculation for the option ``drafter``; write a drafter from scratch first."""
    from flashpatch.patches.eagle.train.drafter_config import kind_of
    from flashpatch.patches.eagle.train.export import check_round_trip, written

    folder = _path(options["drafter"])
    if options["drafter"] in NEW:
        for _, folder in sorted(written(_folder(get, options, dialect)).items(), reverse=True):
            try:  # that of the job that is resumed
                check_round_trip(folder, _target(get), NEW[options["drafter"]], dialect.engine)
                return Speculation(NEW[options["drafter"]], str(folder))
            except Exception as error:  # of a machine that lost power
                logger.warning("%s is passed over: %s", folder, error)
        folder = _folder(get, options, dialect) / "first"
        _write_new(_target(get), folder, options, dialect.engine)
    return Speculation(kind_of(folder), str(folder))


def _write_new(target: Path, folder: Path, options: Mapping[str, Any], engine_name: str) -> None:
    """Write a random drafter for the model in ``target``. Raises `PatchError` if none can be made for it."""
    import torch
    from transformers import AutoConfig

    from flashpatch.patches.eagle.train.drafter import make_drafter
    from flashpatch.patches.eagle.train.drafter_config import drafter_config
    from flashpatch.patches.eagle.train.export import save_drafter
    from flashpatch.patches.eagle.train.target_embeddings import TargetEmbeddings

    of_target, kind = AutoConfig.from_pretrained(target), NEW[options["drafter"]]
    config = drafter_config(of_target, kind)
    if kind == "eagle3" and of_target.num_hidden_layers < EAGLE3_LAYERS:
        raise PatchError(
            f"{MODEL}={target} has {of_target.num_hidden_layers} layers, too few for the inner states that EAGLE-3 reads.",
            patch=ID,
            advice=f"It needs {EAGLE3_LAYERS}; eagle's option drafter=new makes an EAGLE-1 drafter.",
        )
    weights, embeddings = make_drafter(config, 0).state_dict(), TargetEmbeddings.load(target)
    dtype = getattr(torch, _trainer_settings(options).get("dtype", WorkerSettings.dtype))
    save_drafter(folder, weights, config, engine_name, embeddings, dtype=dtype)


def training(
    get: Get, options: Mapping[str, Any], dialect: Dialect, found: Speculation, from_trainer: bool = False
) -> dict[str, Any]:
    """Make what `settings` returns from verl's configuration, with a queue if states come from the trainer. Raises
    PatchError if an entry of the option ``trainer`` is not one of its settings."""
    folder = _folder(get, options, dialect, found.model)
    fixed = {"target": str(_target(get)), "folder": str(folder), "drafter": found.model}
    queue = str(folder / "samples") if from_trainer else ""
    made = WorkerSettings.of(
        {
            **_trainer_settings(options),
            **fixed,
            "engine": dialect.engine,
            "kind": found.method,
            "queue": queue,
        }
    )
    return {
        "settings": {name: value for name, value in vars(made).items() if value or name != "queue"},
        "train_seconds": options["train_seconds"],
        "every": options["train_every"],
    }


def draft_tokens(options: Mapping[str, Any]) -> int:
    """Return the drafts per step for which an engine with the option ``drafter`` is opened: room for the largest arm."""
    return max((arm.steps for arm in map(Arm.parse, options["arms"])), default=0) or DRAFT_TOKENS


def _trainer_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the option ``trainer`` says: settings of the training process."""
    plain = dict(vars(WorkerSettings("", "", "")))
    for name in ("target", "queue", "folder", "drafter", "engine", "kind"):
        del plain[name]
    given: dict[str, Any] = {}
    for text in options["trainer"]:
        name, equals, value = (part.strip() for part in text.partition("="))
        try:
            if not equals or name not in plain:
                raise ValueError
            given[name] = type(plain[name])(value)
        except ValueError:
            raise PatchError(
                f"option trainer has {text!r}.",
                patch=ID,
                advice=f"Give NAME=VALUE, where NAME is one of {', '.join(sorted(plain))}.",
            ) from None
    return given


def _path(text: str) -> Path:
    return Path(user_directories.expand(text))


def _target(get: Get) -> Path:
    """Return the folder of the policy's model; one that is named as on Hugging Face's hub is downloaded, as verl would do."""
    return _local(get(MODEL) or "no model")


@cache
def _local(name: str) -> Path:
    path = _path(name)
    with suppress(Exception):  # no such name, or no network
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    return path


def _folder(get: Get, options: Mapping[str, Any], dialect: Dialect, model: str = "") -> Path:
    """Return a folder beside the job's own checkpoints, which every node sees, for one target, engine and first drafter."""
    first = options["drafter"] if options["drafter"] in NEW else fingerprint(Path(model))
    name = sha256(f"{fingerprint(_target(get))} {dialect.engine} {first}".encode()).hexdigest()[:12]
    return _path(get("trainer.default_local_dir") or "checkpoints").absolute() / "eagle" / name
