"""Laboratory for vLLM's CUDA branch on the fake device: is storage after an update that of a fresh load, byte for byte?"""

import sys

from tree import TREE

sys.path.append(str(TREE / "benchmarks"))  # random models, and what counts calls of Python
