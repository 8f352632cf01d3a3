"""Run ``flashpatch-verify exact MODEL``: exit 0 if engine and trainer agree to rounding, 1 if not, 2 on wrong use, 3 if they do as far
as they were compared, and something was not."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flashpatch.commands.report import Table, emit
from flashpatch.verify.exact import causes
from flashpatch.verify.exact.certificate import Certificate, because
from flashpatch.verify.exact.verl_job import Job, JobError, Trainer, composed
from flashpatch.verify.job import source
from flashpatch.verify.probes import jobs

ENGINES = {"vllm": "engine", "sglang": "sglang_engine"}
"""Modules that open engines, by the package whose engines they are."""
AGREE, DIFFER, USAGE, IN_PART = 0, 1, 2, 3
TEXT = (
    "A trainer and an engine that hold the same weights should give the same probabilities. Seven times eight is 56, and "
    "the capital of France is Paris. def add(a, b): return a + b"
)
RANDOM_TOKENS, DISTINCT = 48, 16
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Names that a model's config may have for how many experts a layer has."""
GIVE = "Give the folder of a checkpoint that transformers loads, or its name on the Hub."
WIDEST_WINDOW = 1024  # tokens; a wider sliding window is not reached
SHOWN = 12


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.verl is None):
        parser.error("give a MODEL, or --verl with the arguments of a job")
    try:
        settings = json.loads(options.engine)
        if not isinstance(settings, dict):
            raise ValueError("is no JSON object")
    except ValueError as error:
        print(f"flashpatch-verify exact: --engine {options.engine}: {error}", file=sys.stderr)
        return USAGE
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is the report's
    try:
        job = Job(options.model, {}) if options.verl is None else composed(options.verl)
        _check_folder(job.model)
        certificate = of_job(job, options, settings)
    except (OSError, ImportError, JobError) as error:
        print(f"flashpatch-verify exact: {error}", file=sys.stderr)
        return USAGE
    emit(certificate.as_json(), tables(certificate), options.json)
    return AGREE if certificate.ok else IN_PART if certificate.agrees else DIFFER


def _check_folder(model: str) -> None:
    """Raise FileNotFoundError if the model is no checkpoint's folder and cannot be the name of one on the Hub."""
    if os.path.isdir(model):
        if not os.path.exists(os.path.join(model, "config.json")):
            raise FileNotFoundError(f"{model} has no config.json. {GIVE}")
    elif not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model):
        raise FileNotFoundError(f"there is no folder {model}. {GIVE}")


def of_job(job: Job, options: argparse.Namespace, engine: dict[str, Any]) -> Certificate:
    """Return the certificate of a job, see `certify`; ``engine`` has arguments that win over the job's."""
    if job.problem:
        return Certificate([], problem=job.problem)
    settings = {**job.engine, **engine}
    with job.trainers_model() as model:
        with _bounded(options.seconds, options.json):
            kind = options.rollout or job.kind
            trainer = job.trainer if options.causes else None
            found = certify(model, options.prompt, settings, options.syncs, kind, trainer)
        if options.causes and not found.problem:
            found = replace(found, causes=(*causes.measured(model, settings, found, options), *found.causes))
    return replace(found, left_out=(*job.left_out, *_replicas(), *found.left_out))


def _replicas() -> Iterator[str]:
    """Name the precisions of a mixed fleet's other replicas."""
    from flashpatch.engine import manager
    from flashpatch.patches.fp8.precision import fleet

    choice = manager.selection.choices.get("fp8")
    entries = fleet.parse(choice.options["fleet"] if choice else [], "[[fp8.fleet]]")
    if entries:
        compared = fleet.assigned(entries, int(os.environ.get(fleet.VERL_REPLICA_RANK, 0)))
        for entry in dict.fromkeys(entries):
            if entry != compared:
                precision = " ".join(filter(None, (entry.precision, entry.scheme)))
                yield f"fp8.fleet's replicas in {precision} (one in {compared.precision} is compared)"


@contextmanager
def _bounded(seconds: float, as_json: bool) -> Iterator[None]:
    """Within, end this process after ``seconds``, whatever it waits for; 0: never."""

    def end() -> None:
        late = Certificate([], problem=f"cannot compare here: not done within {seconds:g} seconds")
        emit(late.as_json(), tables(late), as_json)
        sys.stdout.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(DIFFER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def certify(
    model: str,
    prompt: str = "",
    engine: dict[str, Any] | None = None,
    syncs: int = 0,
    kind: str = "",
    trainer: Trainer | None = None,
) -> Certificate:
    """Open an engine and the Hugging Face model on the same checkpoint, and return their `Certificate`.

    Args:
        model: path or name of a checkpoint that transformers loads unquantized.
        prompt: text to compare on; see `tokens`.
        engine: arguments of `vllm.LLM` or `sglang.Engine`; ``model``, SGLang's ``model_path``, among them is another checkpoint
            for it, ``adapter`` the folder of a LoRA adapter that it serves, ``read`` one of `causes.WAYS`.
        syncs: how often the same weights are loaded into the engine, after which no module may return other bits.
        kind: of the engine, one of `ENGINES`; "" takes the first of them that is installed.
        trainer: whose ways to compute are measured too, as causes."""
    trusted = bool((engine or {}).get("trust_remote_code"))
    kind, wanted = jobs.engine_here(kind), kind or " or ".join(ENGINES)
    if not kind:
        return Certificate([], problem=f"cannot compare here: {wanted} is not installed")
    rollout = importlib.import_module(f"flashpatch.verify.exact.{ENGINES[kind]}")
    begun = time.monotonic()
    from transformers import AutoConfig

    from flashpatch.verify.exact.engine import LONG, STEPS
    from flashpatch.verify.exact.trainer import certified

    try:
        ids, compared = tokens(model, prompt or TEXT, trusted)
        config = AutoConfig.from_pretrained(model, trust_remote_code=trusted).get_text_config()
        # As many as a layer has experts: each has its turn at one.
        experts = [getattr(config, name, None) or 0 for name in EXPERTS]
        more = at_random(config.vocab_size, max(RANDOM_TOKENS, *experts))
        length = max(len(more), len(ids)) + STEPS + LONG
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
        settings = {**rollout.defaults(model, length), **(engine or {})}
        problem = rollout.refusal(settings)
    except (OSError, ImportError) as error:
        if isinstance(error, ImportError) or os.path.isdir(model):
            raise
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise FileNotFoundError(f"there is no folder {model}, and the Hub: {why}. {GIVE}") from error
    except Exception as error:  # whatever a damaged file raises
        return Certificate([], problem=because(error), engine=kind)
    if problem:
        return Certificate([], problem=f"cannot compare here: {problem}")
    if most := settings[rollout.LENGTH]:
        room, more = most - 1 - STEPS, more[: most - 1]
        if len(ids) > room:
            ids, compared = ids[:room], f"the first {room} of {compared}, as {rollout.LENGTH} is {most}"
    try:
        seen, changes = _asked(rollout, model, settings, ids, more, syncs)
        done = time.monotonic()
        asked = model, trusted, seen.ids, pickle.dumps(seen), trainer
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(certified, *asked).result()
    except Exception as error:  # whatever an engine or a model's own code raises
        return Certificate([], problem=because(error), engine=kind)
    seconds = {"engine": done - begun, "trainer's model": time.monotonic() - done}
    return replace(found, syncs=tuple(changes), seconds=seconds, engine=kind, prompt=compared)


def _asked(
    rollout: Any, model: str, settings: dict[str, Any], ids: list[int], more: list[int], syncs: int
) -> tuple[Any, list[str]]:
    """What an engine with these arguments did with the tokens, and what each sync of the same weights changed first."""
    from flashpatch.verify.exact.engine import LONG, first_changed
    from flashpatch.verify.exact.rows import changed

    adapter, way, changes = settings.pop("adapter", ""), settings.pop("read", causes.ALONE), []
    room = min(LONG, (settings[rollout.LENGTH] or sys.maxsize) - 1 - len(ids))
    with rollout.opened(**({"enable_lora": True} if adapter else {}), **settings) as llm:
        seen = rollout.Reader(llm, adapter).read(ids, way, more, room)
        for _ in range(syncs):
            rollout.reload(llm, model)
            again = rollout.Reader(llm, adapter).read(ids, way)
            changes.append(first_changed(seen.ranks, again.ranks, len(ids)) or changed(seen.rows, again.rows))
    return seen, changes


def tokens(model: str, text: str, trusted: bool = False) -> tuple[list[int], str]:
    """Return the tokens that are compared, and in words which they are: the text's, and random ones where those are few, reach past no
    sliding window, or cannot be had: equal tokens give equal values, which attention averages to the same whatever it attends to."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model, trust_remote_code=trusted).get_text_config()
    window, why = getattr(config, "sliding_window", None) or 0, ""
    try:
        ids = AutoTokenizer.from_pretrained(model, trust_remote_code=trusted).encode(text)
    except Exception as error:  # whatever a damaged file raises
        ids, why = [], f" (no tokenizer: {type(error).__name__})"
    ids = [one for one in ids if one < config.vocab_size]
    least = window + DISTINCT if window <= WIDEST_WINDOW else 0
    few = RANDOM_TOKENS if len(set(ids)) < DISTINCT else 0
    more = at_random(config.vocab_size, max(few, least - len(ids), 0))
    random = f" and {len(more)} random ones{why}" if more else ""
    return [*ids, *more], f"{len(ids)} tokens of the prompt{random}"


def at_random(size: int, count: int) -> list[int]:
    """Return so many tokens of a vocabulary, each time the same."""
    import torch

    return torch.randint(size, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def tables(certificate: Certificate) -> list[Table]:
    """Return what is printed: the verdict, and the places that differ or, if none does, those that come nearest to it."""
    if certificate.problem:
        return [Table(certificate.problem, (), (), empty="", notes=certificate.left_out)]
    worst = [place for place in certificate.places if place.differs][:SHOWN]
    shown = worst or sorted(certificate.places, key=lambda place: -place.gap / place.bound)[:3]
    rows = [(str(one), f"{one.gap:.1e}", f"{one.bound:.1e}", ("no", "yes")[one.differs]) for one in shown]
    first = certificate.first
    verdict = f"first differs: {first}" if first else "engine and trainer agree to rounding"
    if certificate.not_compared and certificate.agrees:
        verdict = "compared in part, and that agrees to rounding"
    numbers = [("mean KL, nats", f"{certificate.kl:.1e}", f"{certificate.kl_rounding:.1e}")]
    notes = [f"compared on {certificate.prompt}"] if certificate.prompt else []
    notes += [f"not compared: {what}" for what in certificate.not_compared]
    notes += [f"left out: {what}" for what in certificate.left_out]
    took = ", ".join(f"{part} {seconds:.1f}" for part, seconds in certificate.seconds.items())
    notes += [f"seconds: {took}"] if took else []
    synced = [(str(at), change or "nothing") for at, change in enumerate(certificate.syncs, 1)]
    return [
        Table(verdict, ("distributions", "differ by", "by rounding alone"), numbers, notes=notes),
        Table("Places", ("place", "gap", "bound", "differs"), rows),
        *([_causes(certificate)] if certificate.causes else []),
        *([Table("Syncs of the same weights", ("sync", "first changed"), synced)] if synced else []),
    ]


def _causes(certificate: Certificate) -> Table:
    rows = [("all", "as they are", f"{certificate.kl:.1e}", "")]
    for cause in certificate.causes:
        rows.append((cause.name, cause.to, "" if cause.kl is None else f"{cause.kl:.1e}", cause.part))
    notes = [f"{cause.name}: {cause.problem}" for cause in certificate.causes if cause.problem]
    columns = ("cause", "switched to", "mean KL, nats", "share")
    return Table("Causes, one switched at a time", columns, rows, notes=notes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashpatch-verify exact",
        description="Compare vLLM or SGLang with the Hugging Face model that a trainer trains, and name the first module that differs.",
        epilog="Exit status: 0 they agree to rounding, 1 they differ or cannot be compared, 2 wrong use, 3 what was compared agrees, and "
        "some of the model was not.",
    )
    source.add(parser, "exact")
    return parser
