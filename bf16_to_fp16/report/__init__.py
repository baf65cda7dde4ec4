"""The report: declared as types, built once, and shown on the terminal, as a page and as a model card."""
