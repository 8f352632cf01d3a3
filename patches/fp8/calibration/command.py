"""Run ``flashpatch profile``: find the scales that turn a bf16 model into its quantized form."""

from __future__ import annotations

import argparse
from pathlib import Path

from flashpatch.commands.report import Table, emit
from flashpatch.errors import PatchError
from flashpatch.patches.fp8.calibration import untrusted

HELP = "find the scales that turn a bf16 model into its 8-bit form, from a quantized twin or from prompts"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="BF16", help="checkpoint directory, or id in the local Hugging Face cache"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--quantized", metavar="Q", help="the same model, quantized: compare the two")
    source.add_argument("--flashrl", metavar="FILE", type=Path, help="convert FlashRL's profile.pt")
    source.add_argument("--prompts", metavar="FILE", type=Path, help="calibrate with these, one a line")
    source.add_argument("--random", metavar="N", type=int, help="calibrate with N sequences of random tokens")
    source.add_argument("--show", metavar="FILE", type=Path, help="check a profile and say what is in it")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("profile.safetensors"))
    parser.add_argument("--force", action="store_true", help="overwrite the output")
    parser.add_argument("--form", choices=("int8", "fp8"), default="int8", help="when calibrating")
    parser.add_argument(
        "--alpha", type=float, default=0.5, help="when calibrating: 0 evens weights, 1 activations"
    )
    parser.add_argument(
        "--all", action="store_true", help="when calibrating: exchange between linear layers too"
    )
    parser.add_argument("--limit", type=int, default=512, help="when calibrating: how many prompts")
    parser.add_argument("--length", type=int, default=512, help="when calibrating: tokens of a prompt")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the profile is written; anything else raises PatchError."""
    import torch  # noqa: F401  (said to be missing before anything is read)

    if args.show is not None:
        return _show(args)
    if args.model is None:
        args.usage_error("--model is needed")
    if min(args.limit, args.length, 1 if args.random is None else args.random) < 1:
        args.usage_error("--limit, --length and --random must be at least 1")
    if args.output.exists() and not args.force:
        raise untrusted.refuse(args.output, "exists", "Choose another file with -o, or say --force.")
    import safetensors  # noqa: F401
    import transformers

    from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint

    transformers.logging.set_verbosity_error()
    with Checkpoint(args.model) as model:
        return _make(args, model)


def _make(args: argparse.Namespace, model) -> int:
    from flashpatch.patches.fp8.calibration import report as result
    from flashpatch.patches.fp8.calibration.profile_file import save

    tables = []
    if args.quantized is not None:
        from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
        from flashpatch.patches.fp8.calibration.from_checkpoint import compare

        with Checkpoint(args.quantized) as other:
            profile, rows = compare(model, other)
        tables.append(result.table(rows, "Reconstruction of the quantized weights", ("error", "allowed")))
    elif args.flashrl is not None:
        from flashpatch.patches.fp8.calibration.pickled import convert

        profile, rows = convert(args.flashrl, model), []
    else:
        from flashpatch.patches.fp8.calibration import from_prompts

        if args.random is not None:
            vocabulary = _vocabulary(model)
            sequences = from_prompts.random_tokens(vocabulary, args.random, args.length)
        else:
            texts = (
                from_prompts.BUILT_IN if args.prompts is None else from_prompts.read(args.prompts, args.limit)
            )
            sequences = from_prompts.tokens(model.path, texts, args.length)
        profile, rows = from_prompts.calibrate(model, sequences, args.alpha, args.all, args.form)
        title = "Error of layer outputs with 8-bit weights and activations"
        tables.append(result.table(rows, title, ("error smoothed", "not smoothed")))
    save(profile, args.output, args.force)
    data = {"output": str(args.output), **_facts(profile), "rows": result.as_data(rows)}
    emit(data, [*tables, _summary(args.output, profile)], args.json)
    return 0


def _show(args: argparse.Namespace) -> int:
    from flashpatch.patches.fp8.calibration.profile_file import load

    profile = load(args.show)
    emit({"profile": str(args.show), **_facts(profile)}, [_summary(args.show, profile)], args.json)
    return 0


def _facts(profile) -> dict:
    return {
        "form": profile.form,
        "granularity": profile.granularity,
        "source": profile.source,
        "fingerprint": profile.fingerprint,
        "quantized": len(profile.quantized),
        "exchanges": [
            {
                "producer": e.producer,
                "consumers": list(e.consumers),
                "smallest": float(profile.smooth[e.producer].min()),
                "largest": float(profile.smooth[e.producer].max()),
            }
            for e in profile.exchanges
        ],
    }


def _summary(path: Path, profile) -> Table:
    lines = [
        ("form", f"{profile.form}, one weight scale per {profile.granularity}"),
        (
            "made from",
            {"pair": "a model and its quantized form", "prompts": "prompts", "flashrl": "FlashRL's profile"}[
                profile.source
            ],
        ),
        ("weights in 8 bits", str(len(profile.quantized))),
        (
            "scales exchanged",
            f"{len(profile.exchanges)} times" if profile.exchanges else "none: not smoothed",
        ),
        ("model", profile.fingerprint[:16]),
    ]
    return Table(str(path), ("profile", ""), lines)


def _vocabulary(model) -> int:
    config = model.config.get("text_config", model.config)
    size = config.get("vocab_size") if isinstance(config, dict) else None
    if type(size) is not int or size < 1:
        raise PatchError(
            f"{model.path}/config.json has no vocab_size.",
            patch=untrusted.PATCH,
            advice="Calibrate with --prompts.",
        )
    return size
