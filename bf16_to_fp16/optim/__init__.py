"""AdamW for parameters kept in 16 bits, and the exact rounding that it rests on.

Parameters with gradients come in, and are moved in place. Rounding is to the nearest value or stochastic, by bits that
a seed fixes.
"""
