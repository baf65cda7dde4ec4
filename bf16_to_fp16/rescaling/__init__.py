"""The plan of exponents: what each power of two would cost, which are chosen, and their application to weights."""
