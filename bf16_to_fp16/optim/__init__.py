"""AdamW for parameters kept in 16 bits, and its exact rounding: to nearest, or stochastic with seeded random bits."""
