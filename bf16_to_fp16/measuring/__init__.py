"""What a model does when it runs: stock models and their inputs, taps on every operation, regimes, fidelity.

A checkpoint's folder and batches of ids come in. Out come each site's largest value in each regime of precision, the
ranges of channels that the planner reads, and the differences between two checkpoints' outputs.
"""
