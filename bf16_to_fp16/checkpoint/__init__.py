"""Checkpoints on disk and on the Hub: checked when opened, written as a stream, moved into place once complete."""
