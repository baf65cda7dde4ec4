"""Rescale a model by powers of two, so that its values fit fp16 and its fp32 outputs stay the same.

``planner`` chooses the exponents of a ``Plan``; only ``apply`` scales weights by it."""
