"""Run ``flashpatch profile``: find the scales that turn a bf16 model into its quantized twin."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flashpatch.commands.report import Table, emit
from flashpatch.patches.fp8.calibration.errors import refuse

if TYPE_CHECKING:
    from flashpatch.patches.fp8.calibration.from_checkpoint import Row
    from flashpatch.patches.fp8.calibration.profile_file import Profile

HELP = "find the scales that turn a bf16 model into its quantized twin"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="BF16", help="checkpoint directory, or id in the local Hugging Face cache"
    )
    parser.add_argument(
        "--quantized", metavar="Q", help="the same model, quantized; llm-compressor makes one"
    )
    parser.add_argument("--show", metavar="FILE", type=Path, help="check a profile and say what is in it")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=Path("profile.safetensors"))
    parser.add_argument("--force", action="store_true", help="overwrite the output")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the profile is written; anything else raises PatchError."""
    if args.show is None and (args.model is None or args.quantized is None):
        args.usage_error("--model and --quantized are needed")
    import torch  # noqa: F401  (said to be missing before anything is read)

    if args.show is not None:
        from flashpatch.patches.fp8.calibration.profile_file import load

        profile = load(args.show)
        emit({"profile": str(args.show), **_facts(profile)}, [_summary(args.show, profile)], args.json)
        return 0
    if args.output.exists() and not args.force:
        raise refuse(args.output, "exists", "Choose another file with -o, or say --force.")
    import safetensors  # noqa: F401

    return _make(args)


def _make(args: argparse.Namespace) -> int:
    from flashpatch.patches.fp8.calibration.checkpoint import Checkpoint
    from flashpatch.patches.fp8.calibration.from_checkpoint import compare
    from flashpatch.patches.fp8.calibration.profile_file import save

    with Checkpoint(args.model) as model, Checkpoint(args.quantized) as other:
        profile, rows = compare(model, other)
    save(profile, args.output, args.force)
    data = {"output": str(args.output), **_facts(profile), "rows": [asdict(row) for row in rows]}
    emit(data, [_table(rows), _summary(args.output, profile)], args.json)
    return 0


def _facts(profile: Profile) -> dict:
    return {
        "form": profile.form,
        "granularity": profile.granularity,
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


def _summary(path: Path, profile: Profile) -> Table:
    count = len(profile.exchanges)
    lines = [
        ("form", f"{profile.form}, one weight scale per {profile.granularity}"),
        ("weights in 8 bits", str(len(profile.quantized))),
        ("scales exchanged", f"{count} times" if count else "none: not smoothed"),
        ("model", profile.fingerprint[:16]),
    ]
    return Table(str(path), ("profile", ""), lines)


def _table(rows: Sequence[Row]) -> Table:
    lines = []
    for layer in dict.fromkeys(row.layer for row in rows):
        held = [row for row in rows if row.layer == layer]
        worst = max(held, key=lambda row: row.error)
        lines.append(
            (
                layer,
                str(len(held)),
                f"{sum(row.error for row in held) / len(held):.4f}",
                f"{worst.error:.4f}",
                f"{worst.allowed:.4f}",
                f"{100 * sum(row.equal for row in held) / len(held):.1f}%",
                worst.tensor.removeprefix(f"{layer}."),
            )
        )
    heads = ("layer", "tensors", "mean error", "largest error", "allowed", "values equal", "tensor")
    return Table("Reconstruction of the quantized weights", heads, lines, empty="no tensor is quantized")
