"""Run ``flashpatch advise``: is 8-bit rollout faster for this model on this machine?"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from flashpatch.commands.report import Table, emit

HELP = "whether 8-bit rollout is expected to be faster: measures this machine, predicts no other"

_BATCHES = "1,16,64,256"
_LARGEST = 65536


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="DIR", help="directory with the model's config.json"
    )
    parser.add_argument("--engine", choices=("vllm",), help="also say what this engine would choose here")
    parser.add_argument(
        "--batch", default=_BATCHES, metavar="N,N", help=f"sequences at once (default {_BATCHES})"
    )
    parser.add_argument("--form", choices=("int8", "fp8"), help="only this one")
    parser.add_argument("--device", default="", metavar="D", help="cpu, cuda or cuda:N of this machine")
    parser.add_argument("--measured", metavar="FILE", type=Path, help="use times saved on another machine")
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the times")


def run(args: argparse.Namespace) -> int:
    """Return 0 with an answer, whatever it is; a device that was not measured raises PatchError."""
    import torch  # noqa: F401
    import transformers

    from flashpatch.patches.fp8.advise import measure, shapes, verdict
    from flashpatch.patches.fp8.calibration.report import progress

    batches = _batches(args)
    if args.measured is not None and (args.device or args.save or args.engine):
        args.usage_error("--measured goes without --device, --save and --engine: it is about another machine")
    transformers.logging.set_verbosity_error()
    device = None if args.measured is not None else measure.this_device(args.device)
    products = shapes.of_model(_directory(args.model))
    forms = (args.form,) if args.form else ("int8", "fp8")
    if device is None:
        measured = measure.load(args.measured)
    else:
        wanted = list(verdict.needed(products, batches, forms))
        with progress("measuring", len({(m, k, n) for m, k, n, _ in wanted})) as step:
            measured = measure.measure(wanted, device, step)
        if args.save is not None:
            measure.save(measured, args.save)
    found = [
        verdict.judge(products, measured, b, f) for f in forms if f not in measured.missing for b in batches
    ]
    data = {
        "model": args.model,
        "device": measured.device,
        "where": measured.where,
        "weights": products.weights,
        "touched": products.touched,
        "verdicts": [asdict(v) for v in found],
        "not_measured": measured.missing,
        "engine": _engine(args.engine),
    }
    emit(data, _tables(data, found), args.json)
    return 0


def _tables(data: dict, found: list) -> list[Table]:
    rows = [
        (
            v.form,
            str(v.batch),
            f"{1e3 * v.bf16:.3f}",
            f"{1e3 * v.eight:.3f}",
            f"{v.speedup:.2f}",
            f"{v.best:.2f}",
            v.word,
            "; ".join(v.why),
        )
        for v in found
    ]
    heads = ("form", "batch", "bf16 ms", "8-bit ms", "speedup", "at best", "expected", "why")
    title = f"Matrix products of one decoding step on {data['device']}"
    notes = [
        ("measured", f"torch's kernels, {data['where']}"),
        (
            "in 8 bits",
            f"{100 * data['touched'] / data['weights']:.0f}% of {data['weights'] / 1e6:.1f} million weights",
        ),
        (
            "speedup",
            "of the products; attention, norms, sampling and scheduling take as long as before, so a whole "
            "step gains less; at best: were rounding activations free",
        ),
    ]
    notes += [
        (f"{form} not predicted", f"no kernel here: {why}") for form, why in data["not_measured"].items()
    ]
    if data["engine"]:
        notes += list(data["engine"].items())
    if found and all(v.word in ("same", "slower") for v in found):
        notes.append(
            (
                "advice",
                "stay in bf16 here: 8 bits pay for large dense models with long outputs, where reading weights "
                "or multiplying dominates; a small model's step is mostly overhead, which they add to",
            )
        )
    return [Table(title, heads, rows, empty="nothing could be measured"), Table("Notes", ("", ""), notes)]


def _batches(args: argparse.Namespace) -> list[int]:
    parts = args.batch.split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= _LARGEST for part in parts):
        args.usage_error(f"--batch wants numbers from 1 to {_LARGEST} with commas between")
    return sorted({int(part) for part in parts})


def _directory(model: str) -> Path:
    from flashpatch.patches.fp8.calibration.checkpoint import directory

    return directory(model)


def _engine(name: str | None) -> dict[str, str]:
    if name is None:
        return {}
    from flashpatch.errors import PatchError

    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        raise PatchError(
            "vLLM is not installed here, so its choice of quantization is unknown.",
            patch="fp8.advise",
            advice="Leave --engine out.",
        ) from error
    from flashpatch.contracts import versions
    from flashpatch.patches.fp8.precision import fleet

    what = f"{versions.owner('vllm')} would open this model with quantization={fleet.default_scheme()}"
    return {
        "engine": f"{what} under FLASHPATCH=fp8",
        "kernels": "its kernels are its own: measure a rollout before you rely on these ratios",
    }
