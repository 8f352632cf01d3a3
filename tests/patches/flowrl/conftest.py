"""Jobs on the installed verl, in processes of their own, as platforms and process groups are."""

from __future__ import annotations
