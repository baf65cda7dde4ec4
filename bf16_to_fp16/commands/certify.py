"""``certify``: bound every signal of a checkpoint from its weights, and report it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.certificate import bound, fp16_weights
from ..checkpoint.reader import open_checkpoint
from ..environment import SCHEMA, environment
from ..errors import UserError
from ..progress import Progress
from ..report.remedies import over_limits
from ..report.schema import CertificateEntry, Environment, Report, Source, dump
from ..run.agreement import agreed_layout


def certify(
    source: str | Path,
    *,
    max_length: int = MAX_LENGTH,
    target: str = "half",
    subfolder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Bound every signal of ``source`` (folder or Hub id) for every input, from its weights rounded to fp16, and return
    the report: verdict, certificate with every site, environment.

    Nothing is run: stock code only builds the model, without its values, to show that it is the one that is bounded.
    max_length: positions of a sequence for which it holds. target: ``half``, ``norm-safe`` (also the
    squares of the residual stream summed by a norm) or ``train`` (dropout, and the limit of the cube's derivative).
    Raises UserError for a source that cannot be used.
    """
    progress = progress or Progress(quiet=True)
    if max_length < 1:
        raise UserError(f"a maximum length of {max_length} is not a number of positions; give 1 or more")
    checkpoint = open_checkpoint(source, subfolder)
    layout = agreed_layout(checkpoint)
    with progress.step("Bounding every signal") as advance:
        found = bound(layout, fp16_weights(checkpoint, layout), Arithmetic(max_length), target=target, advance=advance)
    described = CertificateEntry.model_validate(found.to_json())
    report = Report(
        schema=SCHEMA,
        verdict="safe" if found.holds else "unsafe",
        proof="certified" if found.holds else "observed",
        family=layout.family.name,
        source=Source.of(checkpoint),
        target=target,
        certificate=described,
        uncertified=over_limits(described),
        environment=Environment.model_validate(environment()),
    )
    return dump(report)
