"""One SGLang engine in a process of its own, as a crash of its scheduler kills its parent.

    python sglang_job.py FOLDER

reads FOLDER/job.json: ``engine``, keywords of ``sglang.Engine``, and ``steps``, a list of [name, arguments] from
`STEPS`, or ``bare`` for steps without an engine; writes FOLDER/seen.json: what each step returned, in order, and
``done``."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import amx_standin  # noqa: F401  before SGLang
import sglang_bare
import sglang_calls
import sglang_lora
import sglang_sampled
import sglang_session
from sglang_session import begin, end
from sglang_versions import across, versions  # noqa: F401  a step
from vllm_lab.models import weights


def prepare() -> None:
    """Changes to the process that a test asks for by a variable."""
    if os.environ.get("JOB_SAVER") == "1":
        import sglang_saver

        sglang_saver.install()
    if os.environ.get("JOB_LORA_FAULT"):
        sglang_lora.break_rank(os.environ["JOB_LORA_FAULT"])
    if os.environ.get("JOB_CALLS"):
        sglang_calls.install()
    if os.environ.get("JOB_WRITES"):
        from sglang.srt.managers.scheduler import Scheduler

        Scheduler.write_past = lambda self: self.tp_worker.model_runner.model.lm_head.weight.data[0].add_(1)
    if os.environ.get("JOB_ROTATE") != "1":
        return
    from flashpatch.patches.eagle.bandit.policy import Policy

    def rotate(self, batch_size, select=Policy.select):
        """Another arm at every step, whatever it is worth."""
        select(self, batch_size)
        self.turned = getattr(self, "turned", -1) + 1
        return self.arms[self.turned % len(self.arms)]

    Policy.select = rotate


PROMPTS = [list(range(5, 40)), list(range(200, 221)), [7, 8, 9, 10, 11, 12]]


def greedy(count: int) -> dict[str, Any]:
    return dict(temperature=0, max_new_tokens=count, ignore_eos=True)


def answers(engine: Any, count: int = 5) -> list[list[float]]:
    """Logprobs of every prompt, then of greedy continuations that may use the prefix cache; one at a time."""
    found = []
    for prompt in PROMPTS:
        line: list[float] = []
        for more, tokens in ((dict(logprob_start_len=0), 1), ({}, count)):
            info = engine.generate(
                input_ids=prompt,
                sampling_params=greedy(tokens),
                return_logprob=True,
                top_logprobs_num=20,
                **more,
            )["meta_info"]
            line += [triple[0] for triple in info["output_token_logprobs"]]
            given = [info["input_token_logprobs"], info["input_top_logprobs"]] if more else [[], []]
            line += [triple[0] for triple in given[0][1:]]
            for choices in given[1][1:] + info["output_top_logprobs"]:
                line += [value for triple in choices for value in (triple[0], float(triple[1]))]
        found.append(line)
    return found


def tokens(engine: Any, count: int = 24, prompts: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """Greedy continuations, all at once: token ids and, under speculation, how many were accepted per step."""
    outputs = engine.generate(input_ids=prompts or PROMPTS, sampling_params=greedy(count))
    return [
        dict(ids=output["output_ids"], accept=output["meta_info"].get("spec_accept_length"))
        for output in outputs
    ]


def logprobs(engine: Any, count: int = 24) -> list[dict[str, Any]]:
    """Greedy continuations of every prompt, at once: the prompt, token ids and the log-probability of each."""
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=greedy(count), return_logprob=True)
    said = [[one[0] for one in output["meta_info"]["output_token_logprobs"]] for output in outputs]
    return [
        dict(prompt=prompt, ids=output["output_ids"], logprobs=values)
        for prompt, output, values in zip(PROMPTS, outputs, said)
    ]


def refused(engine: Any) -> str:
    """How a request fails, or the empty string."""
    try:
        tokens(engine, 2, PROMPTS[:1])
    except Exception as error:
        return str(error)
    return ""


def update(
    engine: Any, source: str, how: str = "whole", only: str = "", without: str = "", **more: Any
) -> list[Any]:
    """Weights of a checkpoint into the engine, in one session; all the answers that come on the way.

    ``how``: whole, split (q of a layer in one bucket, k and v in the next, and so on), single (a tensor a bucket)
    or flattened."""
    items = _chosen(source, only, without)
    seen = [begin(engine, more.get("selector", "all"))]
    for bucket in buckets(items, how):
        seen.append(send(engine, bucket, how, **more))
    return [*seen, end(engine)]


def within(engine: Any, source: str, without: str = "", dies: bool = False) -> str:
    """The same, a tensor a bucket, within `flashpatch.update`; ``dies``: its sender does before the end. The error."""
    import flashpatch

    sglang_session.settle(engine)
    try:
        with flashpatch.update(engine):
            for part in buckets(_chosen(source, "", without), "single"):
                send(engine, part, "single")
            if dies:
                raise OSError("the sender died")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def loose(engine: Any, source: str, how: str, **more: Any) -> list[Any]:
    """The same without a session, which SGLang needs from 0.5.21 on."""
    return [send(engine, bucket, how, **more) for bucket in buckets(list(weights(source)), how)]


def send(
    engine: Any,
    bucket: list[Any],
    how: str,
    selector: str = "all",
    load_format: str | None = None,
    version: str | None = None,
) -> Any:
    if how == "flattened":
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=bucket)
        packed = dict(flattened_tensor=flat.get_flattened_tensor(), metadata=flat.get_metadata())
        payload, load_format = [MultiprocessingSerializer.serialize(packed)], "flattened_bucket"
    else:
        payload = sglang_session.serialized(engine, bucket)
    return sglang_session.send(engine, payload, selector, load_format=load_format, weight_version=version)


def buckets(items: list[Any], how: str) -> list[list[Any]]:
    if how in ("whole", "flattened"):
        return [items]
    if how == "single":
        return [[item] for item in items]
    firsts = ("q_proj", "up_proj", "embed")
    return [
        [i for i in items if any(f in i[0] for f in firsts)],
        [i for i in items if not any(f in i[0] for f in firsts)],
    ]


def disk(engine: Any, source: str, **more: Any) -> list[Any]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=source, **more)
    asked = engine.tokenizer_manager.update_weights_from_disk(request, None)
    return list(engine.loop.run_until_complete(asked))[:2]


def distributed(engine: Any, source: str) -> list[Any]:
    """Broadcast from a gloo group in which this process is the trainer."""
    import torch
    from sglang.srt.managers.io_struct import InitWeightsUpdateGroupReqInput
    from sglang.srt.utils import init_custom_process_group

    port, name = 29000 + os.getpid() % 2000, "trainer"
    group: list[Any] = []
    common, where = dict(backend="gloo", world_size=2, group_name=name), "127.0.0.1"

    def join() -> None:
        group.append(init_custom_process_group(init_method=f"tcp://{where}:{port}", rank=0, **common))

    joiner = threading.Thread(target=join)
    joiner.start()
    request = InitWeightsUpdateGroupReqInput(master_address=where, master_port=port, rank_offset=1, **common)
    asked = engine.tokenizer_manager.init_weights_update_group(request, None)
    seen = [list(engine.loop.run_until_complete(asked))]
    joiner.join()
    items = list(weights(source))
    seen.append(begin(engine))
    for bucket in buckets(items, "split"):

        def broadcast(bucket=bucket) -> None:
            for _, tensor in bucket:
                torch.distributed.broadcast(tensor, src=0, group=group[0])

        sender = threading.Thread(target=broadcast)
        sender.start()
        names, dtypes, shapes = zip(
            *((n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in bucket)
        )
        said = engine.update_weights_from_distributed(
            list(names), list(dtypes), list(shapes), group_name=name, flush_cache=False
        )
        seen.append(list(said))
        sender.join()
    return [*seen, end(engine)]


def bucket(engine: Any, source: str, only: str = "", without: str = "", **more: Any) -> list[Any]:
    """One bucket within a session opened by `begin`."""
    return send(engine, _chosen(source, only, without), "whole", **more)


def _chosen(source: str, only: str, without: str) -> list[Any]:
    return [(n, t) for n, t in weights(source) if only in n and (not without or without not in n)]


def release(engine: Any, tags: list[str]) -> None:
    """Give memory away, as a trainer asks for it."""
    sglang_session.settle(engine)
    engine.release_memory_occupation(tags)


def resume(engine: Any, tags: list[str]) -> None:
    """Take it back."""
    engine.resume_memory_occupation(tags)


def reset(engine: Any, selector: str = "all", action: str = "reset_tensors") -> list[Any]:
    """Overwrite the weights with random values, as SGLang's ``/weights_checker`` does, or what else it does."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    more = {} if selector == "all" else dict(selector=selector)  # SGLang 0.5.12 knows no other
    asked = CheckWeightsReqInput(action=action, **more)
    return list(engine.loop.run_until_complete(engine.tokenizer_manager.check_weights(asked, None))[:3])


def write_past(engine: Any) -> None:
    """Write into a parameter, past every loader."""
    engine.collective_rpc("write_past")


def audited(engine: Any, source: str, number: int, fault: str = "", victim: str = "") -> list[Any]:
    """A session as verl's trainer sends it under the family fsdp, in two buckets; see `sglang_audit.session`."""
    import sglang_audit

    items = buckets(list(weights(source)), "split")
    return sglang_audit.session(engine, items, number, fault, victim)


def eagle(engine: Any, method: str, given: list[Any]) -> Any:
    """The schedulers' answers to a call of the eagle family, as verl's server makes it; the text of an error."""
    from types import SimpleNamespace

    from flashpatch.errors import PatchError
    from flashpatch.patches.eagle.verl_sglang import eagle_call

    server = SimpleNamespace(tokenizer_manager=engine.tokenizer_manager)
    try:
        return engine.loop.run_until_complete(eagle_call(server, method, tuple(given)))
    except PatchError as error:
        return str(error)


def pause(engine: Any, seconds: float) -> None:
    """What runs beside the engine gets time to finish."""
    time.sleep(seconds)


STEPS: dict[str, Any] = {
    name: globals()[name]
    for name in (
        *"answers tokens logprobs refused update loose disk distributed begin end bucket release resume".split(),
        *"reset write_past versions across audited eagle pause within".split(),
    )
}
STEPS["sampled"] = sglang_sampled.sampled
STEPS |= {
    f"lora.{name}": getattr(sglang_lora, name)
    for name in "load under overwrite across many greedy fault".split()
}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    import sglang

    seen: dict[str, Any] = dict(steps=[], done=False)

    def write() -> None:
        (folder / "seen.json").write_text(json.dumps(seen))

    write()
    if job["bare"]:
        seen["steps"] = [sglang_bare.BARE[name](**given) for name, given in job["steps"]]
        seen["done"] = True
        return write()
    engine = sglang.Engine(**job["engine"])
    try:
        for name, arguments in job["steps"]:
            seen["steps"].append(STEPS[name](engine, **arguments))
            write()
        seen["done"] = True
        write()
    finally:
        engine.shutdown()


prepare()  # the scheduler's process runs this file too, before anything else

if __name__ == "__main__":
    main(Path(sys.argv[1]))
