"""Architectures as data: one file for each family or group of alike ones, in the vocabulary of ``types``.

A config and the names and shapes of tensors come in. ``resolve`` gives a ``Layout``: what each tensor is, which signals
its rows and columns carry, and how the stock class's modules are connected. Nothing above asks for a family's name.
"""
