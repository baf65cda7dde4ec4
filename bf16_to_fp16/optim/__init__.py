"""AdamW for parameters kept in 16 bits, and the exact rounding that it needs. Rounding is to nearest or stochastic,
with random bits that a seed determines."""
