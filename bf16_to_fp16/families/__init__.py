"""Supported architectures as data: one file for each family, in the vocabulary of ``types``."""
