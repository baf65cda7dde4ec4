"""The commands, from their options to their reports."""
