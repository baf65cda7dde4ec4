"""Model architectures declared as data: one file for each family, or for each group of similar families.

A file builds its declarations from the classes in ``types``. ``resolve`` makes a ``Layout``, which says what each
tensor is, from a config and the tensors' names and shapes. No other folder depends on a family's name."""
