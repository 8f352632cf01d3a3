"""Let rollout and trainer have the same support: the tokens that top-p, top-k or min-p kept travel to the trainer."""
