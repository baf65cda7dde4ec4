"""Which components of a pipeline are converted."""

from __future__ import annotations

from collections.abc import Mapping

from ..checkpoint.pipeline_classes import PIPELINES
from .known import family_of, is_known


def is_converted_in(kind: str, name: str, config: Mapping[str, object]) -> bool:
    """Return whether a pipeline class has this component converted: an encoder of a supported family. One with a single
    stack stays as it is where the class is known and not what it reads of that encoder."""
    if not is_known(config):
        return False
    readings = PIPELINES.get(kind)
    read = readings is None or any(reading.encoder == name for reading in readings)
    return read or family_of(config).decoder is not None
