"""The finetune in fp16 with an activation-magnitude penalty, for what ``convert`` leaves unsafe.

A recipe and a corpus go in, ``trainer`` takes the steps under ``mixed_precision`` with ``penalty`` and
``distillation`` as losses, and ``run`` converts what was trained.
"""
