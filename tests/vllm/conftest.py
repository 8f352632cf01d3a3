"""The laboratory is a package beside the tests: `from lab import engines`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
