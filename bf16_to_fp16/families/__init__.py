"""Architectures as data: one file for each family or group of similar ones, in the vocabulary of ``types``.

``resolve`` makes a ``Layout`` of a config and the names and shapes of tensors. No other folder depends on the name of a
family."""
