"""Open a source, print notes on it, and find the role of each tensor: the first step of every command."""

from __future__ import annotations

from pathlib import Path

from ..bounds.activations import check_bounded
from ..checkpoint.contents import MODULES, read_config
from ..checkpoint.hub import SMALL_FILES, fetched
from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.recorded import REPORT, saved_again
from ..checkpoint.sources import local_source, subfolder_of
from ..families.from_config import check_config, in_folder
from ..families.known import is_known, naming_class
from ..families.layout import Layout
from ..measuring.agreement import agreed_layout
from ..measuring.sentence_vectors import runs_behind
from ..progress import Progress
from ..wording import counted


def opened_with_notes(
    source: str | Path, subfolder: str | None, progress: Progress, *, as_class: str | None = None, proof: bool = True
) -> Checkpoint:
    """Check a source's config, then fetch and open its weights and print a note on each assumption. as_class: the class
    to use instead of the config's. proof: accept only classes that have bounds."""
    folder = local_source(source) or fetched(str(source), SMALL_FILES)[0]
    if folder.is_dir():
        folder = folder if subfolder is None else subfolder_of(folder, subfolder)
        config = read_config(folder)
        if not (folder / MODULES).is_file() and (proof or is_known(config)):
            with in_folder("/".join(filter(None, (str(source), subfolder)))):
                declared = check_config(config if as_class is None else naming_class(config, as_class))
                if proof:
                    check_bounded(declared)
    checkpoint = open_checkpoint(source, subfolder)
    for note in checkpoint.notes:
        progress.say(note)
    return checkpoint


def say_where_saved_again(checkpoint: Checkpoint, progress: Progress) -> None:
    if saved_again(checkpoint.folder):
        progress.say(
            f"{checkpoint.name} was converted before, then saved again or merged without its {REPORT}: its weights are"
            " still rescaled, and undo of this conversion will give back rescaled weights, not the original's"
        )


def layout_with_notes(checkpoint: Checkpoint, progress: Progress, max_length: int | None = None) -> Layout:
    """Return the layout, the role of each tensor; print notes on tensors that the class does not read.
    max_length: the most positions that a proof is to cover; None without a proof. For a proof, notes also say what the
    proof leaves out. Raises UserError if a proof is asked for and nothing can be proven."""
    layout = agreed_layout(checkpoint)
    if max_length is not None:
        check_bounded(layout, checkpoint.source)
    if layout.of_other_classes:
        first, *others = sorted(layout.of_other_classes)
        more = f" and {counted(len(others), 'more tensor')}" if others else ""
        progress.say(
            f"{checkpoint.name} holds {first}{more}, which {layout.only_class} does not read: the report is about"
            f" {layout.only_class} alone"
        )
    if max_length is not None and (checkpoint.folder / MODULES).is_file():
        missing = "" if runs_behind(checkpoint.folder) else "; sentence-transformers, which runs them, is missing"
        progress.say(
            f"{checkpoint.name}: the proof ends at the encoder's last states and leaves out later modules{missing}"
        )
    return layout
