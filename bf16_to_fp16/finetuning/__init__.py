"""Finetuning in fp16 with a penalty on large activations, for models that ``convert`` leaves unsafe.

``trainer`` takes the steps of a recipe under ``mixed_precision``, with ``penalty`` and ``distillation`` as losses.
``run`` then converts the trained model."""
