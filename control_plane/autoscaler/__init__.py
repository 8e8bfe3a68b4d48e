"""How many prefill and decode workers there should be: observations in, sizes and reasons out.

Read `decide.py` first. `observations.py` is what goes in, `policy.py` what the operator wants,
`sizing.py` the formulae, `stabilise.py` and `trials.py` what keeps sizes calm, `state.py` what one
decision hands to the next, `executor.py` the two seams to the world. All pure: no I/O, no clock.
docs/autoscaling.md says what happens in every odd case.
"""
