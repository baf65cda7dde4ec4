"""The plan of exponents: the cost of each power of two, their choice, and their application to weights."""
