"""Architectures as data: one file for each family or group of similar ones, in the vocabulary of ``types``.

``resolve`` makes a ``Layout`` of a config and tensors' names and shapes. No other folder depends on a family's name."""
