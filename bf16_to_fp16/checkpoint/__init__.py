"""Checkpoints on disk and on the Hub: checked when they are opened, written as a stream, put in place whole.

A folder, a single file, a pipeline or a Hub id comes in, and ``reader`` gives its config and one tensor at a time.
``writer`` takes scaled tensors and gives a folder or file, which ``staging`` puts in place once it is complete.
"""
