"""Train a drafter on what the engine captured while the policy changes.

`worker` is the process that trains; `coordinator` starts, stops and restarts it. Everything here is
independent of the engine."""
