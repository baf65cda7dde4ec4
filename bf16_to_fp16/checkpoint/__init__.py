"""Checkpoints on disk or on the Hub: checked when they are opened, written as a stream, and put in place whole."""
