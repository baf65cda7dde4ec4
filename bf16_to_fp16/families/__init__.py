"""What each tensor of a supported architecture is, as data: one file for each family, in the vocabulary of ``types``,
and its resolution against one checkpoint.
"""
