"""Run the command as ``python -m flashpatch``."""

import sys

from flashpatch.cli import main

sys.exit(main())
