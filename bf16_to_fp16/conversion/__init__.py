"""The commands, and the steps of a conversion that several commands share."""
