"""What one bound and one plan of a source leave to the next, of the source itself and of it under edits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support import tiny

from bf16_to_fp16.bounds.arithmetic import Arithmetic
from bf16_to_fp16.bounds.certificate import bound
from bf16_to_fp16.bounds.spectral import Spectra
from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.conversion.planning import Opened
from bf16_to_fp16.families.resolve import resolve
from bf16_to_fp16.rescaling.edits import changed_by
from bf16_to_fp16.rescaling.plan import Plan
from bf16_to_fp16.rescaling.planner import make_plan
from bf16_to_fp16.rescaling.rounding_loss import LossTable, Tables, loss_table

EDITS = {
    "pegasus": Plan(
        family="pegasus",
        exponents={"model.encoder.layers.0.neuron": -3},
        centred_keys=["model.encoder.layers.1.self_attn"],
    ),
    "gated": Plan(
        family="t5",
        exponents={
            "encoder.block.0.layer.1.DenseReluDense.gate": -3,
            "encoder.block.1.layer.0.SelfAttention.scores": -2,
        },
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_bounds_and_plans_are_those_that_nothing_was_kept_for(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.save(tiny.build(kind, factor=8.0), tmp_path / "source"))
    source = Opened(checkpoint, resolve(checkpoint), [])
    edited = replace(source, edits=EDITS[kind], before=source)
    tables, computed = Tables(), []
    for opened in (source, edited):
        read = opened.weights(opened.layout)
        kept = tables if opened is source else tables.without(changed_by(opened.layout, EDITS[kind]))
        for r in (-24, -2, 3):
            arithmetic = Arithmetic(64, planned=dict.fromkeys(opened.layout.streams, r))
            again, alone = (
                bound(opened.layout, read, arithmetic, spectra=spectra) for spectra in (opened.spectra, Spectra(read))
            )
            # An eigenvalue that is carried over is a little larger.
            limits = {site.name: site.bound for site in alone.sites}
            assert limits.keys() == {site.name for site in again.sites}
            assert all(0.999999 <= site.bound / limits[site.name] <= 1.01 for site in again.sites if site.bound)
            planned, plain = (
                make_plan(opened.layout, read, again.ranges, margin_bits=0.1, known=known) for known in (kept, None)
            )
            assert planned == plain
        computed.append(len(opened.spectra.outputs))
    # All of the edited source's feed-forwards but one were there, and most of its tables.
    layers = sum(name.endswith(("fc2.weight", "wo.weight")) for name in source.layout.tensors)
    outputs = source.spectra.under(source.weights(source.layout), changed_by(source.layout, EDITS[kind])).outputs
    assert len(outputs) * layers == computed[0] * (layers - 1)
    assert 0 < len(tables.without(changed_by(source.layout, EDITS[kind])).kept) < len(tables.kept)


def test_tables_keep_no_more_than_they_may() -> None:
    table, computed = loss_table(torch.randn(8, 8), 0), list[str]()
    tables = Tables(most=2 * (table.counts.nbytes + table.errors.nbytes))

    def compute(name: str) -> LossTable:
        computed.append(name)
        return table

    for name in ("a", "b", "c", "a", "c"):
        tables.of(name, None, partial(compute, name))
    assert computed == ["a", "b", "c", "c"] and set(tables.kept) == {("a", None), ("b", None)}
