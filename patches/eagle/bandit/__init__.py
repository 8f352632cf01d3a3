"""Which speculative configuration the next decode step should use, learned while decoding.

Plain Python without torch (`agree` apart): an engine asks `policy.Policy.select` before a step and tells
`policy.Policy.update` what the step gave.
"""
