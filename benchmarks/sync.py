"""What the audit costs of one weight sync of verl: trainer's shards, gather, shared memory, vLLM.

    python benchmarks/sync.py [--sizes 50M 350M] [--threads 1 2] [--ranks 1] [--precision bf16] [--syncs 6]
    [--json]

Needs verl and vLLM on a CPU under Linux. Random Qwen2 models are made in a temporary directory. Each rank is
a process with verl's own FSDP engine (FSDP2, bf16) that exports and sends; for each, another process holds a
real vLLM engine that receives, loads and post-processes, as verl's rollout worker does. Every second sync is
audited (audit_every=2), so that both kinds meet the same conditions; the first two are not counted. Medians.

share is the time that an audited sync takes longer, over that of one without; the columns of seconds are:
gather, spent in exporting; load, in the rollout engine's load and post-processing; transfer, all the rest;
trainer and rollout, what the fingerprints took on either side's second thread, which overlaps the other
columns."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import quick

from flashpatch.commands.report import Table, emit

HERE = Path(__file__).resolve()
AIM = 0.05
SIZES = {
    "5M": dict(vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4),
    "50M": dict(vocab_size=16384, hidden_size=512, intermediate_size=2048, num_hidden_layers=9),
    "350M": dict(vocab_size=32768, hidden_size=1024, intermediate_size=4096, num_hidden_layers=18),
}
WARM = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["50M", "350M"], choices=SIZES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--syncs", type=int, default=6, help="audited syncs that count")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    given = quick.parse(parser, sizes=["50M"], threads=[1], syncs=2)
    if given.part:
        part, folder = given.part
        seen = {"trainer": trainer, "rollout": rollout}[part](Path(folder), int(os.environ["RANK"]))
        Path(folder, f"{part}-{os.environ['RANK']}.json").write_text(json.dumps(seen))
        return
    results = [
        measure(size, threads, given.ranks, given.precision, given.syncs)
        for size in given.sizes
        for threads in given.threads
    ]
    columns = ("MB", "plain s", "audited s", "gather", "transfer", "load", "trainer", "rollout", "share")
    rows = [[r["size"], str(r["threads"]), *(r[name] for name in columns)] for r in results]
    title = f"One weight sync with and without the audit; aim: share below {AIM:.0%}"
    emit(results, [Table(title, ("model", "threads", *columns), rows)], given.json)


def measure(size: str, threads: int, ranks: int, precision: str, syncs: int) -> dict[str, Any]:
    """Run both sides and take medians."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        from flashpatch.verify.probes.fsdp import job

        sizes = dict(SIZES[size])
        job.make_model(folder / "model", dtype="bfloat16", **sizes)
        (folder / "plan.json").write_text(json.dumps({"syncs": WARM + 2 * syncs}))
        (folder / "options.toml").write_text("[fsdp]\naudit_every = 2\n")
        running = [
            start(folder, part, rank, ranks, threads, precision)
            for part in ("rollout", "trainer")
            for rank in range(ranks)
        ]
        try:
            while any(process.poll() is None for process in running):
                if any(process.poll() for process in running):
                    break
                time.sleep(0.2)
        finally:
            for process in running:
                process.kill()
        if any(process.wait() for process in running):
            logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
            sys.exit(f"a process failed:\n{logs}")
        sent = json.loads((folder / "trainer-0.json").read_text())
        got = json.loads((folder / "rollout-0.json").read_text())
        bytes_ = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    both = [{**one, **other} for one, other in zip(sent, got, strict=True)][WARM:]
    audited, plain = both[0::2], both[1::2]

    def middle(rows: list[dict[str, float]], name: str) -> float:
        return median(row[name] for row in rows)

    took, without = middle(audited, "total"), middle(plain, "total")
    load = middle(plain, "load")
    gather = middle(plain, "gather")
    return {
        "size": size,
        "threads": threads,
        "ranks": ranks,
        "precision": precision,
        "MB": f"{bytes_ / 1e6:.0f}",
        "plain s": f"{without:.3f}",
        "audited s": f"{took:.3f}",
        "gather": f"{gather:.3f}",
        "transfer": f"{without - load - gather:.3f}",
        "load": f"{load:.3f}",
        "trainer": f"{middle(audited, 'trainer'):.3f}",
        "rollout": f"{middle(audited, 'rollout'):.3f}",
        "share": f"{took / without - 1:+.1%}",
    }


def start(
    folder: Path, part: str, rank: int, ranks: int, threads: int, precision: str
) -> subprocess.Popen[bytes]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHPATCH", "VERL_"))}
    env = {
        **kept,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": str(threads),
        "DIST_INIT_METHOD": f"file://{folder}/meet",
        "FLASHPATCH": f"cpu,{precision},fsdp",
        "FLASHPATCH_CONFIG": str(folder / "options.toml"),
        "FLASHPATCH_LEDGER": str(folder / "ledger"),
        "VERL_REPLICA_RANK": str(rank),
        "VERL_RAY_JOB_ID": f"bench{os.getpid()}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (folder / f"{part}-{rank}.log").open("wb") as log:
        command = [sys.executable, str(HERE), "--part", part, str(folder)]
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def wait_for(path: Path) -> str:
    while not path.exists():
        time.sleep(0.02)
    return path.read_text()


def trainer(folder: Path, rank: int) -> list[dict[str, float]]:
    """Send as often as planned; seconds of each sync."""
    import torch
    from verl.utils import distributed
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from flashpatch import ledger
    from flashpatch.verify.probes import verl_actor

    distributed.initialize_global_process_group_ray(timeout_second=600)
    engine = verl_actor.engine("fsdp2", folder / "model", rate=0.05, model_dtype="bf16")
    handle = wait_for(folder / f"handle-{rank}")
    syncs = json.loads((folder / "plan.json").read_text())["syncs"]
    seen = []
    for number in range(syncs):
        wait_for(folder / f"ready-{rank}-{number}")
        torch.distributed.barrier()
        spent = {"gather": 0.0}
        began = time.perf_counter()
        weights, _ = engine.get_per_tensor_param()
        sender = BucketedWeightSender(handle, bucket_size_mb=128, use_shm=True)
        asyncio.run(sender.async_send_weights(timed(weights, spent)))
        wait_for(folder / f"done-{rank}-{number}")
        spent["total"] = time.perf_counter() - began
        spent["trainer"] = ledger.notes()["audit"].get("seconds", 0.0)
        seen.append(spent)
    distributed.destroy_global_process_group()
    return seen


def timed(weights: Any, spent: dict[str, float]) -> Any:
    """The same weights; seconds that they took to come are added up."""
    source = iter(weights)
    while True:
        began = time.perf_counter()
        item = next(source, None)
        spent["gather"] += time.perf_counter() - began
        if item is None:
            return
        yield item


def rollout(folder: Path, rank: int) -> list[dict[str, float]]:
    """Receive into a real vLLM engine, through verl's own worker extension."""
    from verl.workers.rollout.vllm_rollout import utils
    from vllm import LLM
    from vllm.model_executor.models import registry

    from flashpatch import ledger

    registry._run_in_subprocess = lambda function: function()
    spent = {"load": 0.0}
    llm = LLM(
        model=str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
        worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    )
    worker_class = utils.vLLMColocateWorkerExtension
    stock_load = worker_class._update_weights

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return stock_load(self, *args, **kwargs)
        finally:
            spent["load"] += time.perf_counter() - began
            spent["last"] = time.perf_counter()

    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = executor.driver_worker.worker
    for kind in type(worker).__mro__:
        if "_update_weights" in vars(kind):
            kind._update_weights = update
    (handle,) = llm.collective_rpc("_get_zmq_handle")
    publish(folder / f"handle-{rank}", handle)
    seen = []
    for number in range(json.loads((folder / "plan.json").read_text())["syncs"]):
        spent.update(load=0.0, last=0.0)
        publish(folder / f"ready-{rank}-{number}", "")
        llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
        spent["load"] += time.perf_counter() - spent["last"]  # post-processing follows the last bucket
        publish(folder / f"done-{rank}-{number}", "")
        seen.append({"load": spent["load"], "rollout": ledger.notes().get("audit", {}).get("seconds", 0.0)})
    return seen


def publish(path: Path, text: str) -> None:
    """Write so that whoever waits for the file sees all of it."""
    draft = path.with_name(f".{path.name}")
    draft.write_text(text)
    draft.rename(path)


if __name__ == "__main__":
    main()
