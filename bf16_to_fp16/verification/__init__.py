"""The checks of ``verify``: what a report says, held against files, plan, original, bounds and runs."""
