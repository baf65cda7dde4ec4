"""Every family keeps the contract, whatever the architecture."""

from __future__ import annotations

import tiny
from contract import Contract

from bf16_to_fp16.families import FAMILIES


class TestT5(Contract):
    kinds = ("t5", "gated", "silu", "gelu", "t5-encoder")


class TestMT5(Contract):
    kinds = ("mt5", "mt5-encoder")


class TestUMT5(Contract):
    kinds = ("umt5", "umt5-encoder")


class TestPegasus(Contract):
    kinds = ("pegasus",)


def test_every_family_and_every_tiny_model_is_under_contract() -> None:
    covered = [kind for family in Contract.__subclasses__() for kind in family.kinds]
    assert sorted(covered) == sorted(tiny.KINDS)
    models = {tiny.build(family.kinds[0]).config.model_type for family in Contract.__subclasses__()}
    assert models == {family.model_type for family in FAMILIES}
