"""Rescale a model by powers of two, so that its values fit fp16 and its fp32 outputs stay the same.

``planner`` chooses the exponents from a layout, its weights, and the ranges and bounds of its sites. The result, a
``Plan``, is data. Only ``apply`` scales weights by a plan, on the way to disk or in memory, and changes the config."""
