"""Whether a checkpoint is safe in fp16, measured: run, searched for its worst input, and compared with its source."""
