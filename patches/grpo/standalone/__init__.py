"""Parts of async-grpo for use alone; no patch calls them."""
