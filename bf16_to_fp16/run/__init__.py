"""Stock models: the class that a config names, loaded from a folder, and run on the tokens of the probe or of texts."""
