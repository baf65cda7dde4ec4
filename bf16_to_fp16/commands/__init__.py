"""What each command does, from its options to its report."""
