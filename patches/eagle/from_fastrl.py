"""Take over the settings that FastRL (TLT) adds to verl's: ``speculative.*``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flashpatch.migration.given import Given, Setting
from flashpatch.migration.plan import Plan, is_on
from flashpatch.patches._shared import verl_moved
from flashpatch.patches.eagle.bandit.arm import OFF, Arm

HELP = "FastRL (TLT): mit-han-lab/fastrl"

PREFIX = "speculative."
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"+{ROLLOUT}.engine_kwargs.sglang"
RULES = {"EG": "eg", "UCB1": "ucb1", "BEG": "beg", "PREDEFINED": "predefined"}
DEFAULTS = {
    "eagle.spec_steps": "8",
    "eagle.spec_topk": "4",
    "eagle.spec_verify_tokens": "48",
    "eagle.mab_configs": "[8_4_32,8_4_16,8_4_8]",
    "eagle.mab_bs_threshold": "[1,2,5,21]",
    "bs_threshold": "32",
}
"""FastRL's own values, which hold where a script names none."""
BEG_RANGES = [1, 2, 5, 21]
"""Smallest batch sizes of the ranges of the rule beg."""

LOST = {
    "train.training_interval_steps": "the drafter is trained after each step's rollouts, for at most `slice` seconds",
    "train.max_epochs": "training runs for slices of time, see slice in [eagle], not for epochs",
    "train.min_workers_for_training": "the drafter's trainer is one process of its own",
    "train.optim.lr_warmup_steps": "the drafter's rate is constant; set rate in trainer",
    "train.optim.min_lr_ratio": "the drafter's rate is constant; set rate in trainer",
    "train.optim.warmup_style": "the drafter's rate is constant; set rate in trainer",
    "train.optim.weight_decay": "the drafter's optimizer has no setting for it",
    "train.ulysses_sequence_parallel_size": "the drafter's trainer is one process of its own",
    "train.enable_step_barrier": "the drafter's trainer is one process of its own",
}
"""Settings below ``speculative.`` without a counterpart, and why."""
OTHERWISE = {
    "train.checkpoint_path": "drafters and checkpoints are in eagle/ below trainer.default_local_dir",
    "train.collect_hidden_states_from_sgl": "states are always those of the engine while it generated",
}
"""Settings below ``speculative.`` that have another form here."""


def migrate(given: Given, plan: Plan) -> None:
    """Fill the plan from what was given."""
    ours = {name.removeprefix(PREFIX): s for name, s in given.overrides.items() if name.startswith(PREFIX)}
    for setting in ours.values():
        plan.take_out(setting)
    verl_moved.apply(given, plan, "sglang")
    if not is_on(ours.get("enable"), default=True):
        plan.do_otherwise(ours["enable"], "nothing is switched on: speculation was off")
        return
    plan.enable("eagle")
    strategy = ours.get("spec_strategy")
    if strategy is not None and strategy.value.lower() not in ("eagle", "eagle3"):
        plan.lose(strategy, "drafters are eagle's or eagle3's here")
    _drafter(ours, plan)
    engine = given.overrides.get(f"{ROLLOUT}.name")
    if engine is not None and engine.value == "vllm":
        _chain(ours, plan)
    else:
        _tree(ours, plan)
    _training(ours, plan)
    for name, setting in ours.items():
        if name in LOST and setting.value != "null":
            plan.lose(setting, LOST[name])
        elif name in OTHERWISE and setting.value != "null":
            plan.do_otherwise(setting, OTHERWISE[name])
        elif name not in KNOWN:
            plan.lose(setting, "not a known setting of FastRL")


def _value(ours: Mapping[str, Setting], name: str) -> Setting:
    return ours.get(name, Setting(PREFIX + name, DEFAULTS[name], "FastRL's default"))


def _items(setting: Setting) -> list[str]:
    """Return the items of a list as Hydra and YAML write it."""
    return [item.strip(" '\"") for item in setting.value.strip("[] ").split(",") if item.strip(" '\"")]


def _drafter(ours: Mapping[str, Setting], plan: Plan) -> None:
    path = ours.get("eagle.spec_model_path")
    if path is None or path.value == "null":
        plan.lose(
            "speculative.eagle.spec_model_path", 'not given; set drafter in [eagle] to a folder, or to "new"'
        )
        return
    plan.option("eagle", "drafter", path.value, path)
    if not path.is_open and not Path(path.value).is_dir():
        plan.do_otherwise(
            path, f"drafter must be a folder on this machine: hf download {path.value} --local-dir DIR"
        )


def _chain(ours: Mapping[str, Setting], plan: Plan) -> None:
    """vLLM drafts chains: the steps stay, trees do not."""
    steps = plan.number(_value(ours, "eagle.spec_steps"), int)
    if steps is not None:
        plan.option("eagle", "draft_tokens", steps, _value(ours, "eagle.spec_steps"))
    for name in ("eagle.spec_topk", "eagle.spec_verify_tokens", "eagle.mab_configs"):
        plan.lose(
            _value(ours, name),
            "vLLM drafts chains, no trees; the bandit chooses among chains up to draft_tokens",
        )
    _rule(ours, plan, arms=None)


def _tree(ours: Mapping[str, Setting], plan: Plan) -> None:
    """SGLang drafts trees: the shape goes to the engine, the arms to the bandit."""
    shape = [_value(ours, f"eagle.{name}") for name in ("spec_steps", "spec_topk", "spec_verify_tokens")]
    numbers = [plan.number(setting, int) for setting in shape]
    if None in numbers:
        return
    steps, topk, tokens = numbers
    names = ("num_steps", "eagle_topk", "num_draft_tokens")
    for name, number, setting in zip(names, numbers, shape, strict=True):
        plan.set_verl(f"{SGLANG}.speculative_{name}", number, f"was {setting.name}")
    if topk > 1:
        plan.set_verl(
            f"{SGLANG}.disable_overlap_schedule", True, "trees need it; under verl they were never run"
        )
    arms: list[str] = []
    for text in (f"{steps}_{topk}_{tokens}", *_items(_value(ours, "eagle.mab_configs"))):
        try:
            arm = Arm.parse(text)
        except RuntimeError as error:
            plan.lose(f"speculative configuration {text}", str(error))
            continue
        if arm != Arm.DISABLE and (arm.steps > steps or arm.topk > topk or arm.draft_tokens > tokens):
            plan.lose(
                f"speculative configuration {text}", "larger than the one that the engine is opened with"
            )
        elif str(arm) not in arms:
            arms.append(str(arm))
    plan.option(
        "eagle", "arms", [*arms, *([OFF] if OFF not in arms else [])], _value(ours, "eagle.mab_configs")
    )
    _rule(ours, plan, arms)


def _rule(ours: Mapping[str, Setting], plan: Plan, arms: list[str] | None) -> None:
    """Take over the rule, its ranges of batch sizes, and the batch size above which nothing is drafted."""
    algorithm, limit = ours.get("eagle.tune_algorithm"), _value(ours, "bs_threshold")
    rule = RULES.get(algorithm.value.upper()) if algorithm is not None else None
    if algorithm is None:
        plan.do_otherwise(
            "speculative.eagle.tune_algorithm=BEG, FastRL's default",
            'the rule is thompson, which is ahead of it on every recorded trace; rule = "beg" is FastRL\'s',
        )
    elif rule is None:
        plan.lose(algorithm, f"FastRL's rules are {', '.join(RULES)}")
    else:
        plan.option("eagle", "rule", rule, algorithm)
    threshold = _value(ours, "eagle.mab_bs_threshold")
    try:
        starts = [int(item) for item in _items(threshold)]
    except ValueError:
        plan.lose(threshold, "not a list of batch sizes")
        return
    if rule == "predefined" and arms is not None:
        _table(starts, arms, limit, threshold, plan)
        return
    if rule is not None and starts:
        largest = [*(start - 1 for start in starts[1:]), starts[-1]]
        plan.option("eagle", "groups", [str(size) for size in largest], threshold)
    if rule == "beg" and starts != BEG_RANGES:
        plan.lose(
            threshold, "the rule beg has the ranges 1, 2, 5 and 21; what is learned is kept apart by groups"
        )
    if limit.value != "null":
        plan.do_otherwise(
            limit, f"{OFF} is an arm: the bandit learns from which batch size on drafting does not pay"
        )


def _table(starts: list[int], arms: list[str], limit: Setting, threshold: Setting, plan: Plan) -> None:
    """Write FastRL's predefined mapping out: the largest draft for the smallest batches."""
    drafting = sorted((arm for arm in arms if arm != OFF), key=lambda arm: -Arm.parse(arm).draft_tokens)
    if len(drafting) != len(starts):
        plan.lose(threshold, f"{len(starts)} batch sizes for {len(drafting)} configurations")
        return
    last = plan.number(limit, int) if limit.value != "null" else 4096
    ends = [*(start - 1 for start in starts[1:]), last if last else 4096]
    plan.option(
        "eagle", "table", [f"{end}:{arm}" for end, arm in zip(ends, drafting, strict=True)], threshold
    )


def _training(ours: Mapping[str, Setting], plan: Plan) -> None:
    """Take over the drafter's training, which FastRL leaves off unless it is asked for."""
    asked = ours.get("train.enable_drafter_training")
    if not is_on(asked):
        plan.option("eagle", "cotrain", False)
        plan.option("eagle", "capture", False)
        plan.do_otherwise(
            asked or "speculative.train.enable_drafter_training=false, FastRL's default",
            "the drafter stays as it is; leave cotrain and capture out to have it trained between rollouts",
        )
        return
    length, rows = ours.get("train.max_seq_len"), ours.get("train.batch_size_per_gpu")
    settings = []
    window = plan.number(length, int) if length is not None else None
    if window is not None:
        plan.option("eagle", "capture_window", window, length)
        settings.append(f"window={window}")
    if rows is not None and (number := plan.number(rows, int)) is not None:
        settings.append(f"batch={number * (window or 512)}")
    rate, samples = ours.get("train.optim.lr"), ours.get("train.data_buffer_max_size")
    if rate is not None and (value := plan.number(rate, float)) is not None:
        settings.append(f"rate={value:g}")
    if samples is not None and (value := plan.number(samples, int)) is not None:
        settings.append(f"samples={value}")
    if settings:
        plan.option("eagle", "trainer", settings)


KNOWN = frozenset(
    {"enable", "spec_strategy", "eagle.spec_model_path", "eagle.tune_algorithm", *DEFAULTS, *LOST, *OTHERWISE}
    | {
        f"train.{name}"
        for name in ("enable_drafter_training", "max_seq_len", "batch_size_per_gpu", "optim.lr")
    }
    | {"train.data_buffer_max_size"}
)
