"""A survey: every checkpoint of a list audited, certified and converted, each in a process of its own."""
