"""Run models: stock models and their inputs, observers of every operation, regimes of precision, fidelity."""
