"""Advice on training in 16 bits, apart from any conversion.

A model, an optimizer's settings or a training log come in. Out come the share of updates that a format loses, the
standard deviations of stock initialisation, and the spikes, divergences and plateaus of a loss.
"""
