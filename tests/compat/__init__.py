"""The second environment, and scripts that judge a folder as a stranger would, by stock code."""
