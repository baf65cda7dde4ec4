"""Checkpoints on the disk or the Hub: read with every check, rewritten as a stream, put in place whole."""
