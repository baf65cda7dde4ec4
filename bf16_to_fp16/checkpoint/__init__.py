"""A checkpoint on the disk or the Hub: read without believing it, rewritten in a stream of pieces, and put in its place
whole.
"""
