"""Run models: stock models and their inputs, observers of every operation, regimes of precision, fidelity.

The input is a checkpoint's folder and batches of ids. The results are each site's largest value in each regime, the
ranges of channels for the planner, and the differences between two checkpoints' outputs."""
