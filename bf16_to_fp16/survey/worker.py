"""One checkpoint of a survey, in a process of its own: ``python -m bf16_to_fp16.survey.worker FOLDER``.

The survey writes the job to standard input, one line of JSON, and later "go", once there is memory for it. The pipe is
kept open: when the survey ends, however it does, the pipe closes and this process goes as well. Standard output has one
line of JSON, what is known before the work; all else that is printed goes to the log.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import system
from ..errors import UserError, first_line
from ..wording import bytes_in_words

RESULT, CONVERTED = "result.json", "converted"


AUDIT, AUDIT_PAGE, CERTIFICATE = "audit.json", "audit.html", "certificate.json"


REPORTS = (AUDIT, AUDIT_PAGE, CERTIFICATE, "fp16_report.json", "fp16_report.html")
"""The reports of a checkpoint, the last two as the conversion wrote them."""


def key_of(source: str, revision: str | None, subfolder: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a result was made from: the source with its revision or the hashes of its files, the version of
    this package, and the options with the hash of the text that was run."""
    from ..checkpoint.folder import records, sha256_of
    from ..checkpoint.places import local_source
    from ..environment import installed

    local, text = local_source(source), options.get("data")
    files: Any = None
    if local is not None:
        inside = local / (subfolder or "")
        files = {r["name"]: r["sha256"] for r in records(inside)} if inside.is_dir() else {local.name: sha256_of(local)}
    if text is not None and Path(text).is_file():
        options = options | {"data_sha256": sha256_of(Path(text))}
    return {
        "source": source,
        "revision": revision,
        "subfolder": subfolder,
        "files": files,
        "version": installed("bf16_to_fp16"),
        "options": options,
    }


def survey_one(job: dict[str, Any], folder: Path, found: dict[str, Any], wait: Callable[[], None]) -> None:
    """Audit, certify and convert one checkpoint, write the reports to ``folder``, and put what they say into ``found``.

    wait: called when the checkpoint is there and its size is known, before the work. Raises UserError where something
    cannot be done; ``found`` then has what was found until then.
    """
    from ..checkpoint.folder import write_json
    from ..checkpoint.reader import open_checkpoint
    from ..commands.audit import audit
    from ..commands.certify import certify
    from ..commands.convert import convert
    from ..families.known import architectures, is_known
    from ..report.page import write_page
    from ..report.schema import PAGE, REPORT, Report, read
    from .rows import of_audit, of_certificate, of_conversion

    source, subfolder, options = job["where"], job["subfolder"], dict(job["options"])
    checkpoint = open_checkpoint(source, subfolder)
    if checkpoint.revision is not None:  # what a branch stands for may change meanwhile
        source = f"{job['source']}@{checkpoint.revision}"
        found["revision"] = checkpoint.revision
    sizes = {(info.file, info.offset): info.shape for info in checkpoint.tensors.values()}
    found["parameters"] = sum(count(shape) for shape in sizes.values())
    found["architecture"] = next(iter(architectures(checkpoint.config)), None)
    wait()
    asked = {key: options[key] for key in ("data", "seed", "device")}
    audited = audit(source, subfolder=subfolder, **asked)
    write_json(folder / AUDIT, audited)
    write_page(folder / AUDIT_PAGE, read(Report, audited))
    found |= of_audit(read(Report, audited))
    if not is_known(checkpoint.config):
        found["status"] = "audit only"
        return
    certified = certify(source, subfolder=subfolder, device=options["device"])
    write_json(folder / CERTIFICATE, certified)
    found |= of_certificate(read(Report, certified))
    converted = folder / CONVERTED
    check_disk(folder, 2 * found["parameters"])
    done = convert(source, converted, target=options["target"], subfolder=subfolder, **asked)
    found |= of_conversion(read(Report, done.report))
    for name in (REPORT, PAGE):
        shutil.copy(converted / name, folder / name)
    if not job["keep"]:
        shutil.rmtree(converted)
    found["status"] = "done"


def count(shape: tuple[int, ...]) -> int:
    """Return the elements of a tensor."""
    elements = 1
    for size in shape:
        elements *= size
    return elements


def check_disk(folder: Path, needed: int) -> None:
    """Raise UserError unless the converted weights fit on the disk."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"the converted weights take {bytes_in_words(needed)} on the disk, and {bytes_in_words(free)} are free;"
            " free some space, or choose another OUTDIR, and run the same command again"
        )


def run(job: dict[str, Any], folder: Path, opened: Callable[[dict[str, Any]], None]) -> None:
    """Survey one checkpoint and write its result, failed or not; an exception is one line of it, and in the log."""
    from ..checkpoint.folder import write_json
    from ..run.memory import peak

    found: dict[str, Any] = {"status": "failed"}
    begun = time.monotonic()

    def wait() -> None:
        nonlocal begun
        opened(found)
        begun = time.monotonic()

    try:
        survey_one(job, folder, found, wait)
    except Exception as error:
        traceback.print_exc()
        known = isinstance(error, UserError)
        found["error"] = first_line(error) if known else f"{type(error).__name__}: {first_line(error)}"
        shutil.rmtree(folder / CONVERTED, ignore_errors=True)
    found |= {"seconds": time.monotonic() - begun, "peak_bytes": peak()}
    key = None
    if found["status"] != "failed":
        key = key_of(job["source"], job["revision"], job["subfolder"], job["options"])
    write_json(folder / f"{RESULT}.new", {"key": key, "found": found})
    system.replace_file(folder / f"{RESULT}.new", folder / RESULT)  # there whole or not at all


def main(folder: Path) -> None:
    """Do the job on standard input, and end with the survey that gave it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # to the log, whoever prints
    job = json.loads(sys.stdin.readline())
    may_go = threading.Event()

    def watch() -> None:
        while system.received(0):  # not sys.stdin, whose lock would be held when this process ends
            may_go.set()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

    def opened(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)
        may_go.wait()

    run(job, folder, opened)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
