"""A drafter that keeps learning from what the engine captured while the policy moves.

`worker` is the process that trains; `coordinator` starts, stops and outlives it; `judge` decides whether new
weights stay. Everything here is independent of the engine.
"""
