"""Learn while decoding which speculative configuration the next decode step should use.

Plain Python without torch, `rank_broadcast` excepted: an engine calls `policy.Policy.select` before a step
and `policy.Policy.update` with the step's tokens and seconds after it."""
