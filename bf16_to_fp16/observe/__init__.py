"""What every operation of a running model puts out: the only place that registers hooks on a model's modules.

Observer, tap and meter see the same places under the same names: under autograd, above it, and channel by channel.
Modes elsewhere (``run.products``, ``finetuning.mixed_precision``) change how an operation is computed and keep nothing.
"""
