"""The laboratory is a package beside the tests: `from vllm_lab import engines`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
