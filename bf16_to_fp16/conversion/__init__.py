"""The functions behind the commands, and the steps of a conversion that several of them share."""
