"""Bounds are held against deeper models than the other tests run."""

from collections.abc import Iterator

import pytest
from support import tiny

DEEP = (
    (tiny.T5_SHAPE, {"num_layers": 3, "num_decoder_layers": 2}),
    (tiny.PEGASUS_SHAPE, {"encoder_layers": 3, "decoder_layers": 2}),
    (tiny.GEMMA3_SHAPE, {"num_hidden_layers": 3}),
)


@pytest.fixture(scope="module", autouse=True)
def deep_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for shape, layers in DEEP:
            for key, number in layers.items():
                patch.setitem(shape, key, number)
        yield
