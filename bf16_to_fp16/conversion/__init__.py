"""The steps of a conversion, each from the last one's result: options, opening, planning, rewriting, measuring."""
