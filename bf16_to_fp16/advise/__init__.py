"""Advice on training in 16 bits, separate from any conversion: the fraction of updates lost in rounding, the standard
deviations of stock initialisation, and the spikes, divergences and plateaus of a loss."""

OPTIMIZERS = ("adamw", "adam", "adafactor", "lion")  # of which ``advise updates`` knows the size of an update
