"""Checkpoints on disk and on the Hub: checked when opened, written as a stream, moved into place once complete.

``reader`` opens a source, and gives its config and one tensor at a time. ``writer`` writes scaled tensors, which
``staging`` moves into place."""
