"""Checkpoints on disk and on the Hub: checked when opened, written piece by piece, moved into place once complete."""
