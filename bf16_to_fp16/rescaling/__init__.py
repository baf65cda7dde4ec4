"""The plan of exponents: what each power of two would cost, their choice, and their application to weights.

A layout with ranges and bounds of its sites comes in. ``planner`` gives a ``Plan``, which is data. ``apply`` scales the
weights by it, in a stream of tensors or in memory, and changes the config to match; nothing else does.
"""
