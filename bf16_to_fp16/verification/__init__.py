"""The checks of ``verify``: a report against files, plan, original, bounds and runs."""
