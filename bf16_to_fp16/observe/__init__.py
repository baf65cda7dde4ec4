"""What every operation of a running model puts out; the only place that reads values by hooks. Observer, tap and meter
give sites the same names."""
