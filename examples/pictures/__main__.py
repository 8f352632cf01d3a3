"""Draw pictures again from their numbers: ``python examples/pictures NUMBERS.json... [--to DIRECTORY]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pictures import save  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(prog="python examples/pictures", description=__doc__)
    parser.add_argument(
        "numbers", type=Path, nargs="+", help="files that an example wrote beside its picture"
    )
    parser.add_argument("--to", type=Path, help="directory of the pictures (default: beside the numbers)")
    chosen = parser.parse_args()
    for file in chosen.numbers:
        out = (chosen.to or file.parent) / f"{file.stem}.png"
        try:
            save(json.loads(file.read_text()), out)
        except ModuleNotFoundError as missing:
            sys.exit(f"{missing}: pip install 'flashpatch[plot]'")
        except (OSError, ValueError) as problem:
            sys.exit(f"{file}: {problem}")
        print(out)


if __name__ == "__main__":
    main()
