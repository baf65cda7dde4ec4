"""AdamW for parameters kept in 16 bits, and the exact rounding that it rests on."""
