"""Show what one job did, from its ledger: a page, a live view, and metrics."""
