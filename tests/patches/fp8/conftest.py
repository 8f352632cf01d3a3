"""The toy models are a module beside the tests: `import fp8_toys`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
