"""Advice on training in 16 bits: updates lost in rounding, initialisation, and the course of a loss."""

OPTIMIZERS = ("adamw", "adam", "adafactor", "lion")  # of which ``advise updates`` knows the size of an update
