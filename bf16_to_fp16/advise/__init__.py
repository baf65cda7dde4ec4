"""Advice on training in 16 bits: what the formats hold, how weights should begin, which updates vanish."""
