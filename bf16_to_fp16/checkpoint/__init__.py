"""Checkpoints on disk and on the Hub: checked when opened, written as a stream, moved into place once complete.

``reader`` opens a folder, a single file, a pipeline or a Hub id, and gives its config and one tensor at a time.
``writer`` writes scaled tensors into a folder or file, which ``staging`` moves into place."""
