"""Finetuning in fp16 with a penalty on large activations, for models that ``convert`` leaves unsafe."""
