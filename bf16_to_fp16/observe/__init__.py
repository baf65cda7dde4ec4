"""Read the output of every operation of a running model by hooks. Observer, tap and meter name sites alike."""
