"""From a selection to armed patches."""
