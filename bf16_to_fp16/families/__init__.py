"""Architectures declared as data, in one file for each family or group of similar families, with the classes of
``types``.

``resolve`` makes a ``Layout``, which says what each tensor is, from a config and the tensors' names and shapes. No
other folder depends on a family's name."""
