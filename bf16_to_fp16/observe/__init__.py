"""What every operation of a running model puts out: the only place that looks at values by hooks on a model's modules.

Observer, tap and meter see the same sites under the same names: under autograd, above it, and channel by channel.
Hooks of ``run.lanes`` make a run wait for its weights, and modes elsewhere (``run.products``,
``finetuning.mixed_precision``) change how an operation is computed; they keep nothing.
"""
