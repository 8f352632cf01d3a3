"""Give each benchmark ``--quick``: sizes so small that it ends within a minute or two, to see that it runs."""

import argparse
import sys


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a benchmark's docstring as it stands."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse(parser: argparse.ArgumentParser, **small: object) -> argparse.Namespace:
    """Add ``--quick``, which gives other options these defaults, and parse the command line."""
    parser.add_argument("--quick", action="store_true", help="see that it runs; its times mean nothing")
    if "--quick" in sys.argv[1:]:
        parser.set_defaults(**small)
    return parser.parse_args()
