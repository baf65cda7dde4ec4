"""What every operation of a running model puts out: the only place that looks at values by hooks on a model's modules.

Observer, tap and meter see the same sites under the same names: under autograd, above it, and channel by channel.
Hooks of ``run.lanes`` only wait for weights; the modes of ``run.products`` and ``finetuning`` only change a kernel.
"""
