"""Advice on training in 16 bits: on updates lost in rounding, on initial weights, and on the course of a loss."""

OPTIMIZERS = ("adamw", "adam", "adafactor", "lion")  # of which ``advise updates`` knows the size of an update
