"""Whether a checkpoint is safe in fp16, measured: run the ways people run it, searched for its worst input, and
compared with its source.
"""
