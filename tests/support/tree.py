"""Name the directories that tests run scripts from."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TREE = SUPPORT.parents[1]
