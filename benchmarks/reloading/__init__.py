"""Parts of reload.py: what one weight update costs."""
