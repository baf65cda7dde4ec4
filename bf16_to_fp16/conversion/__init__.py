"""The steps of a conversion, each from what the last one found: options, opened, decided, rewritten, measured."""
