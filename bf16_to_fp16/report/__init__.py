"""The report: declared as types and built once, then shown on the terminal, as a page and as a model card."""
