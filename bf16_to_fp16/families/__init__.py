"""Architectures as data: one file for each family or group of similar ones, in the vocabulary of ``types``.

The input is a config and the names and shapes of tensors. ``resolve`` returns a ``Layout``: the role of each tensor,
the activations (signals) with which its rows and columns are rescaled, and the connections of the stock class's
modules. No other folder depends on the name of a family."""
