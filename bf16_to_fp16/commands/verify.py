"""Whether a converted folder is what its report says: anyone's check of a published or local checkpoint.

A report is only a claim. The files are hashed, the plan is held against config and weights (and replayed, where the
original is at hand), the certificate is computed again from the weights, and the audit is run again. Each thing that
does not hold is named with its reason; what comes after a failed hash would speak of other files and is not run.
"""

from __future__ import annotations

import glob
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..auditing.regimes import REGIMES, RegimeResult, audit_folder
from ..bounds.arithmetic import MAX_LENGTH, Arithmetic
from ..bounds.certificate import TARGETS, Certificate, fp16_weights
from ..bounds.spectral import CARRIED
from ..checkpoint.folder import MODULES, carry_over, sha256_of
from ..checkpoint.folder import is_weights as is_weights_in_any_format
from ..checkpoint.formats import bytes_of, read_json, read_whole_header, shown
from ..checkpoint.hub import reading_from
from ..checkpoint.packing import LAYOUTS, summary_of
from ..checkpoint.pipeline import has_variant, variant_name
from ..checkpoint.places import CONVERTED, local_folder
from ..checkpoint.reader import VIEWS, Checkpoint, contained, open_checkpoint, own_name, subfolder_of
from ..checkpoint.shards import INDEX
from ..checkpoint.side_modules import read_side_modules, write_in_fp16
from ..checkpoint.single_file import TOKENIZER
from ..checkpoint.writer import write_fp16
from ..devices import Device
from ..environment import SCHEMA
from ..errors import UserError
from ..families.configs import changes, looked_up, without_value
from ..families.known import padding_entry, stock_class
from ..families.layout import Layout
from ..families.resolve import resolve
from ..progress import Progress
from ..quiet import quiet
from ..report.build import tiers_of
from ..report.remedies import CONVERT_AGAIN, REMOVE, RIGHT_REVISION, UNSAFE_BY_REPORT, unsafe_sites
from ..report.schema import (
    REPORT,
    BoundEntry,
    CertificateEntry,
    Claim,
    Environment,
    FileEntry,
    Inputs,
    ProblemEntry,
    Report,
    Source,
    TierEntry,
    Verification,
    dump,
    read_report,
    regimes_of,
)
from ..report.stored import Packed, read_packed
from ..rescaling.apply import DTYPE_KEYS, edited_config, writes
from ..rescaling.plan import Plan, exponents_of
from ..run import probe
from ..run.agreement import agreed_layout
from ..run.batch import SWEEP
from ..run.stock import load_config
from ..wording import bytes_in_words
from .certify import bounded

LISTS_OTHER = "lists something that convert does not write; convert the source again"


NEEDED = {
    key: f"has no {key}, so convert did not write it; convert the source again"
    for key in ("verdict", "source.sha256", "source.config_changes", "output.files", "plan", "certificate.sites")
}
"""What a report must have to be checked, and what is said where it is missing."""


WRONG = {
    "plan.": "its plan is not one of this program; convert the source again",
    "target": "its certificate names no target and length; convert the source again",
    "certificate.max_length": "its certificate names no target and length; convert the source again",
    "certificate.splits": "its certificate names no target and length; convert the source again",
    "inputs.seed": "its seed is not a number; convert the source again",
}
"""What is said where something in it is not what convert writes."""


OF_NO_MODEL = ("architectures", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
"""Keys of a config that say nothing of the model itself, but for the class that ``architectures`` names."""


OBEYED = ("generation_config.json", MODULES)
"""Files beside the weights on which it depends what a folder computes."""


CHECKS = ("files", "plan", "replay", "certificate", "audit", "tiers")


BOUND_TOLERANCE = 1e-3
"""Relative difference of a recomputed bound that another machine's arithmetic may make."""


@dataclass(frozen=True)
class Problem:
    """Something that does not hold: which check found it, at which file or site, why, and what to do."""

    check: str
    name: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        """Return it in one line."""
        return f"{self.name}: {self.reason}; {self.remedy}"


@quiet()
def verify(
    source: str | Path,
    *,
    original: str | Path | None = None,
    data: str | None = None,
    run_model: bool = True,
    subfolder: str | None = None,
    endpoint: str | None = None,
    device: str | torch.device = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check a converted checkpoint (folder, one file or Hub id) against its report and return what was found.

    original: the source (folder or Hub id) that the recorded plan is replayed on. data: text to audit on besides the
    built-in probe. run_model: False leaves the audit out. subfolder: of the checkpoint in
    the source. endpoint: the Hub's address. device: auto, cpu, cuda, cuda:N
    or mps. ``verdict`` is "safe" where every check holds and the report itself says so (of one file its metadata, which
    list no hashes); ``problems`` names the others, ``as_reported`` says that they are those of an unsafe checkpoint
    whose report is true. Raises UserError for a source that is not a converted checkpoint.
    """
    progress = progress or Progress(quiet=True)
    if data is not None and not run_model:
        raise UserError("data is of no use where nothing is run; leave out either --data or --no-audit")
    on, name, revision, found = Device(device, progress), own_name(source), None, Findings()
    if Path(source).is_file():
        subject, files = packed_subject(Path(source)), 1
    else:
        folder, revision, extra = locate(source, subfolder, endpoint, progress)
        name = name if revision is None else str(source)
        report = read_recorded(folder)
        if original is not None and report.finetune is not None:
            raise UserError(f"{source} was finetuned, so no plan leads to it from the original; leave out --original")
        subject, files = Subject(folder, report, lambda: recorded_plan(folder), report.source), len(report.output.files)
        with progress.step("Hashing the files") as advance:
            found.add("files", check_files(folder, report, extra=extra, advance=advance))
    claim, problems = subject.claim, found.problems
    if not problems:
        origin = None if original is None else open_checkpoint(original, endpoint=endpoint)
        examine(subject, origin, data, found, run_model=run_model, device=on, progress=progress)
    if not claim.safe:
        said = "says itself that the checkpoint is unsafe"
        problems.append(Problem("report", subject.said_in, said, UNSAFE_BY_REPORT))
    totals = None
    if found.certificate is not None:
        totals = {key: value for key, value in found.certificate.to_json().items() if key != "sites"}
    return dump(
        Verification(
            schema=SCHEMA,
            verdict="unsafe" if problems else "safe",
            verified=not problems,
            as_reported=not claim.safe and only_what_is_reported(problems, claim),
            source=Source(path=name, revision=revision),
            report=Claim(verdict=claim.verdict, proof=claim.proof, family=claim.family),
            checks=found.outcome,
            problems=[ProblemEntry(**asdict(problem)) for problem in problems],
            files=files,
            target=claim.target,
            certificate=None if totals is None else CertificateEntry.model_validate(totals),
            tiers=found.tiers,
            padding=found.padding,
            regimes=regimes_of(found.regimes),
            environment=Environment.model_validate(on.environment()),
        )
    )


@dataclass(frozen=True)
class Subject:
    """What is verified: the folder or file, what is claimed of it, and the plan and source that are recorded.

    packed, max_length: of one file, what it says of itself and for what length its certificate holds.
    """

    place: Path
    claim: Report
    plan: Callable[[], Plan]
    source: Source
    packed: Packed | None = None
    max_length: int = MAX_LENGTH

    @property
    def said_in(self) -> str:
        """Where the claims stand."""
        return REPORT if self.packed is None else self.place.name


@dataclass
class Findings:
    """What was found so far: problems, how each check ended, and what was computed again."""

    problems: list[Problem] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=lambda: dict.fromkeys(CHECKS, "not run"))
    certificate: Certificate | None = None
    tiers: dict[str, TierEntry] = field(default_factory=dict)
    regimes: Mapping[str, RegimeResult] = field(default_factory=dict)
    padding: int | None = 0

    def add(self, check: str, problems: list[Problem]) -> None:
        """Note how a check ended."""
        self.outcome[check] = "failed" if problems else "passed"
        self.problems += problems


def check_unread(checkpoint: Checkpoint, report: Report) -> list[Problem]:
    """Return the files of weights that are read and not listed, as hidden ones, and those listed that a loader may read
    in another format or as a variant: any but variants that are the very same, and single files that
    ``publish --add`` put there."""
    listed = {entry.name: entry.sha256 for entry in report.output.files}
    read = [checkpoint.file_name(file) for file in checkpoint.weight_files]
    reason = "is not in the report, so nothing is known of it"
    problems = [Problem("files", name, reason, CONVERT_AGAIN) for name in read if name not in listed]
    variants = {name: variant_name(name) for name in read if name.startswith("model")}
    hashes = {variant: listed.get(name) for name, variant in variants.items()}
    for name in sorted(listed.keys() - {*read, *([] if checkpoint.index is None else [INDEX])}):
        if "/" in name or not is_weights_in_any_format(name):
            continue
        file = checkpoint.folder / name
        if name == variant_name(INDEX) and checkpoint.index is not None:
            placed = {tensor: variants.get(shard) for tensor, shard in checkpoint.index["weight_map"].items()}
            same = read_json(file, "index").get("weight_map") == placed
        elif name in hashes:
            same = listed[name] == hashes[name]
        else:
            same = not has_variant([name]) and summary_of(file) is not None
        if not same:
            reason = f"holds other weights than {read[0]}, of which nothing is known"
            problems.append(Problem("files", name, reason, REMOVE))
    return problems


def examine(
    subject: Subject,
    original: Checkpoint | None,
    data: str | None,
    found: Findings,
    *,
    run_model: bool,
    device: Device,
    progress: Progress,
) -> None:
    """Hold the plan against config and weights, replay it on the original, and compute certificate, audit and tiers
    again."""
    claim, checkpoint = subject.claim, open_checkpoint(subject.place)
    layout, plan = agreed_layout(checkpoint), subject.plan()
    found.padding = padding_entry(layout.config)
    if subject.packed is not None:
        found.add("files", check_tensors(subject.place, checkpoint, subject.packed))
    else:
        found.add("files", check_unread(checkpoint, claim))
    found.add("plan", check_plan(checkpoint, layout, plan, subject.source))
    if original is not None:
        found.add("replay", replay(original, checkpoint, plan, subject.source, progress))
    if subject.packed is None:
        found.certificate, certified = recompute(checkpoint, layout, claim, progress, device)
        found.add("certificate", check_certificate(found.certificate, claim))
    else:
        arithmetic = Arithmetic(subject.max_length)
        weights, target = fp16_weights(checkpoint, layout), claim.target or "half"
        found.certificate, certified = bounded(weights, layout, target, arithmetic, device, progress)
        found.add("certificate", check_proof(found.certificate, claim))
    if run_model:
        found.regimes = repeat_audit(checkpoint.folder, claim, progress, device, data=data)
        found.add("audit", check_audit(found.regimes))
    found.tiers = tiers_of(layout, certified, found.regimes)
    found.add("tiers", check_tiers(found.tiers, certified, claim, ran=run_model))


def check_tensors(file: Path, checkpoint: Checkpoint, inside: Packed) -> list[Problem]:
    """Return the tensors of one file that ``convert --layout`` does not write: those under other names, such as scales
    that a loader multiplies with, and those in another dtype."""
    naming = LAYOUTS[inside.layout]
    ours = {naming.from_stock(name) for name in checkpoint.tensors}
    problems = []
    for name, info in sorted(read_whole_header(file, any_dtype=True)[0].items()):
        if info.dtype == "U8" and name.rpartition(".")[2] == TOKENIZER:
            continue
        if name not in ours or info.dtype != "F16":
            reason = "is not among the tensors that convert writes" if name not in ours else f"is in {info.dtype}"
            problems.append(Problem("files", name, reason, CONVERT_AGAIN))
    return problems


def dtypes_of(config: Mapping[str, Any]) -> dict[str, object]:
    """Return what a config, and those inside it, say of the dtype, by key."""
    found = {key: config[key] for key in DTYPE_KEYS if config.get(key) is not None}
    for name, inner in config.items():
        if isinstance(inner, Mapping):
            found |= {f"{name}.{key}": inner[key] for key in DTYPE_KEYS if inner.get(key) is not None}
    return found


def check_config(layout: Layout, checkpoint: Checkpoint, plan: Plan) -> list[Problem]:
    """Return the keys of a config that are not what the plan makes of the original's; layout: the original's."""
    wanted, found = edited_config(layout, plan), checkpoint.config
    differing = ["architectures"] if stock_class(wanted) != stock_class(found) else []
    for key in OF_NO_MODEL:
        wanted, found = without_value(wanted, key), without_value(found, key)
    reason = "is not what the conversion makes of the original's config.json"
    differing += changes(wanted, found)
    return [Problem("replay", f"config.json, {key}", reason, CONVERT_AGAIN) for key in sorted(differing)]


def packed_subject(file: Path) -> Subject:
    """Return what one file that ``convert --layout`` wrote claims in its metadata, which hold no hash and no bounds.

    Raises UserError where no conversion wrote it, or its metadata are damaged.
    """
    said = summary_of(file)
    if said is None:
        raise UserError(f"{file}: convert --layout did not write it; give a file that it wrote, or a converted folder")
    inside = read_packed(file)
    try:
        known = {key: said[key] for key in ("verdict", "proof", "target", "tiers")}
        claim, longest = Report.model_validate({"schema": SCHEMA} | known), int(said["max_length"])
        if claim.target not in TARGETS or longest < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: its metadata are damaged; convert the source again") from error
    claim = claim.model_copy(update={"family": inside.plan.family})
    return Subject(file, claim, lambda: inside.plan, inside.source, inside, longest)


def only_what_is_reported(problems: Sequence[Problem], report: Report) -> bool:
    """Return whether the problems of an unsafe checkpoint are those that its report names itself: the verdict, and
    sites that break."""
    broken = {entry.signal for entry in report.unsafe if entry.kind == "broke"}
    return all(each.check == "report" or (each.check == "audit" and each.name in broken) for each in problems)


# --- where it lies ---------------------------------------------------------------------------------------------------


def locate(
    source: str | Path, subfolder: str | None, endpoint: str | None, progress: Progress
) -> tuple[Path, str | None, list[str]]:
    """Return the folder of a converted checkpoint, the commit that a Hub id stood for (else None), and the files of
    its repository that its report does not know."""
    folder = local_folder(source, CONVERTED)
    if folder is None:
        return fetch(str(source), subfolder, endpoint, progress)
    folder = folder if subfolder is None else subfolder_of(folder, subfolder)
    if not (folder / REPORT).exists():
        check_below(folder, [path.relative_to(folder).as_posix() for path in folder.glob(f"*/{REPORT}")])
    return folder, None, []


def check_below(source: str | Path, reports: Sequence[str]) -> None:
    """Raise UserError for a source without a report that has some in folders below it."""
    if reports:
        names = " or ".join(sorted(name.removesuffix(f"/{REPORT}") for name in reports))
        raise UserError(f"{source} has no {REPORT} of its own; give --subfolder {names}")


def fetch(source: str, subfolder: str | None, endpoint: str | None, progress: Progress) -> tuple[Path, str, list[str]]:
    """Download what a repository's report lists and nothing else; return the folder, the commit, and the names of the
    repository's other files.

    Raises UserError for a repository without a report, and where the disk has no room for it.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    repo, _, asked = source.partition("@")
    inside = "" if subfolder is None else subfolder.strip("/") + "/"
    api = HfApi(endpoint=endpoint)

    def tree() -> tuple[str, dict[str, int]]:
        commit = str(api.repo_info(repo, revision=asked or None).sha)
        entries = api.list_repo_tree(repo, revision=commit, recursive=True)
        files = [entry for entry in entries if isinstance(entry, RepoFile) and entry.path.startswith(inside)]
        return commit, {entry.path.removeprefix(inside): entry.size for entry in files}

    def download(*names: str) -> Path:
        patterns = [glob.escape(inside + name) for name in names]
        return reading_from(
            repo,
            asked,
            lambda: Path(snapshot_download(repo, revision=commit, allow_patterns=patterns, endpoint=endpoint), inside),
            endpoint,
        )

    commit, sizes = reading_from(repo, asked, tree, endpoint)
    if REPORT not in sizes:
        check_below(repo, [name for name in sizes if name.endswith(f"/{REPORT}")])
        raise UserError(
            f"{repo} has no {inside}{REPORT}, so this program did not convert it; audit and certify take any source"
        )
    folder = download(REPORT)
    listed = [entry.name for entry in read_recorded(folder).output.files]
    wanted = [name for name in listed if name in sizes]
    nbytes = sum(sizes[name] for name in wanted if not (folder / name).exists())  # what the cache has is not fetched
    check_free_space(repo, nbytes, Path(constants.HF_HUB_CACHE))
    with progress.step(f"Fetching {len(wanted)} files, {bytes_in_words(nbytes)}"):
        folder = download(REPORT, *wanted)
    return folder, commit, sorted(set(sizes) - {REPORT, *listed})


def check_free_space(repo: str, nbytes: int, cache: Path) -> None:
    """Raise UserError where the disk of ``cache`` has no room for so many bytes."""
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise UserError(
            f"{repo} needs {bytes_in_words(nbytes)} and the disk of the cache has {bytes_in_words(free)};"
            " free some space, or set HF_HOME to a folder on another disk"
        )


def read_recorded(folder: Path, *, whole: bool = False) -> Report:
    """Return the report of a converted folder: what is checked of it but for the plan, or the ``whole``.

    Raises UserError where there is none, or it lacks what can be checked.
    """
    path = folder / REPORT
    if not path.is_file():
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    contained(folder, REPORT)
    also, unread = (
        (None, ()) if whole else (("target", "tiers", "proof", "family", "inputs", "finetune", "unsafe"), ("plan",))
    )
    report = read_report(path, NEEDED, LISTS_OTHER, also=also, unread=unread, wrong=WRONG, version=SCHEMA)
    if any(entry.nbytes is None or entry.sha256 is None for entry in report.output.files):
        raise UserError(f"{path}: {LISTS_OTHER}")
    return report


# --- files -----------------------------------------------------------------------------------------------------------


def present_files(folder: Path) -> list[str]:
    """Return the names of all files below a folder but hidden ones, which no library reads, sorted."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))


def check_files(folder: Path, report: Report, *, extra: Sequence[str] = (), advance: Any = None) -> list[Problem]:
    """Return what differs between the files of a folder and those that its report lists.

    extra: names of further files, known to exist elsewhere in the same repository.
    """
    listed = {entry.name: entry for entry in report.output.files}
    if not any(map(is_weights, listed)) or "config.json" not in listed:
        return [Problem("files", REPORT, "lists no weights or no config.json", CONVERT_AGAIN)]
    owner = {str(entry.sha256): name for name, entry in listed.items()}
    total, done, problems = sum(entry.nbytes or 0 for entry in listed.values()), 0, []
    for name, entry in listed.items():
        path = contained(folder, name)
        if not path.is_file():
            problems.append(Problem("files", name, "is missing", CONVERT_AGAIN))
            continue
        digest = sha256_of(path)
        if digest != entry.sha256:
            problems.append(Problem("files", name, difference(path, name, digest, entry, owner, report), CONVERT_AGAIN))
        done += entry.nbytes or 0
        if advance is not None:
            advance(done, total)
    for name in sorted({*present_files(folder), *extra} - {REPORT, *listed}):
        if not name.startswith("."):
            reason = "is not in the report, so nothing is known of it"
            problems.append(Problem("files", name, reason, REMOVE))
    return problems


def difference(path: Path, name: str, digest: str, entry: FileEntry, owner: Mapping[str, str], report: Report) -> str:
    """Return how a file differs from what the report says of it."""
    size, expected = path.stat().st_size, entry.nbytes or 0
    if owner.get(digest, name) != name and is_weights(name) and is_weights(owner[digest]):
        return f"holds what belongs in {owner[digest]}: the shards are swapped"
    if name == "config.json":
        changed = changed_keys(path, report)
        return f"the config was changed{changed} (SHA-256 {digest[:12]}…, not {str(entry.sha256)[:12]}…)"
    if size != expected:
        return f"has {size:,} bytes and the report says {expected:,}: cut short, or another file"
    kind = "the weights were changed or damaged" if is_weights(name) else "was changed or damaged"
    return f"{kind}: its {size:,} bytes have the SHA-256 {digest[:12]}…, not {str(entry.sha256)[:12]}…"


def is_weights(name: str) -> bool:
    """Return whether a file holds weights."""
    return name.endswith(".safetensors")


def changed_keys(path: Path, report: Report) -> str:
    """Return which of the keys that the conversion set have another value now, in words; empty for none of them."""
    try:
        config = json.loads(path.read_bytes())
        edits = report.source.config_changes
        wrong = {key: sides["after"] for key, sides in edits.items() if looked_up(config, key) != sides.get("after")}
    except (ValueError, KeyError, AttributeError):
        return ""
    return "".join(f", {key} is {looked_up(config, key)} instead of {value}" for key, value in wrong.items())


# --- plan ------------------------------------------------------------------------------------------------------------


def recorded_plan(folder: Path) -> Plan:
    """Return the plan that the report of a converted folder holds; raise UserError where it holds none."""
    plan = read_report(folder / REPORT, {"plan": NEEDED["plan"]}, LISTS_OTHER, wrong=WRONG).plan
    assert plan is not None  # asked for
    return plan


def check_plan(checkpoint: Checkpoint, layout: Layout, plan: Plan, source: Source) -> list[Problem]:
    """Return where the recorded plan and the checkpoint contradict each other: family, signals, channels, config."""

    def problem(name: str, reason: str) -> Problem:
        return Problem("plan", name, reason, CONVERT_AGAIN)

    if plan.family != layout.family.name:
        return [problem("plan", f"is for {plan.family}, and the checkpoint is {layout.family.name}")]
    problems = [
        problem(name, "the plan moves it, and the checkpoint has no such signal")
        for name in plan.exponents
        if name not in layout.signals
    ]
    for tensor in layout.tensors.values():
        try:
            exponents_of(tensor, plan)
        except (UserError, RuntimeError, OverflowError) as error:
            problems.append(problem(tensor.name, " ".join(str(error).partition(";")[0].split())))
    if plan.untied_head and layout.tied is not False:
        problems.append(problem("config.json", "the plan separates the head, and the checkpoint has it tied"))
    for key in layout.family.eps_keys if plan.eps is not None else ():
        found = looked_up(checkpoint.config, key)
        if found != plan.eps:
            problems.append(problem("config.json", f"{key} is {found} and the plan needs {plan.eps}"))
    recorded = {name: sides["after"] for name, sides in source.config_changes.items() if "after" in sides}
    for name, after in recorded.items():
        if (found := looked_up(checkpoint.config, name)) != after:
            problems.append(problem("config.json", f"{name} is {found} and the report says {after}"))
    for name, dtype in dtypes_of(checkpoint.config).items():
        if dtype != "float16" and name not in recorded:
            problems.append(problem("config.json", f"{name} is {dtype}, which stock code loads the weights in"))
    return problems


def replay(
    original: Checkpoint, checkpoint: Checkpoint, plan: Plan, source: Source, progress: Progress
) -> list[Problem]:
    """Return where applying the recorded plan to the original does not give the checkpoint's weights, bit for bit, and
    its config, where the original has one of its own."""
    for file in original.weight_files:
        name = original.file_name(file)
        if source.sha256.get(name) != original.sha256(file):
            return [Problem("replay", name, "is not the file that was converted", RIGHT_REVISION)]
    agreed_layout(original)
    layout = resolve(original, untie=plan.untied_head)
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-replay-") as scratch:
        with progress.step("Replaying the plan on the original") as advance:
            write_fp16(original, writes(layout, plan), Path(scratch), advance=advance)
        (Path(scratch) / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8", newline="\n")
        again = open_checkpoint(scratch)
        differing = sorted(set(again.tensors) ^ set(checkpoint.tensors))
        for name in sorted(set(again.tensors) & set(checkpoint.tensors)):
            ours, theirs = again.read(name), checkpoint.read(name)
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape or bytes_of(ours) != bytes_of(theirs):
                differing.append(name)
    reason = "is not what the plan makes of the original"
    problems = [Problem("replay", name, reason, CONVERT_AGAIN) for name in differing]
    if original.folder in VIEWS:
        return problems
    problems += check_config(layout, checkpoint, plan)
    return problems if checkpoint.folder in VIEWS else problems + check_carried(original.folder, checkpoint.folder)


def check_carried(original: Path, folder: Path) -> list[Problem]:
    """Return the files beside the weights, such as tokenizer and generation settings, that are not what a conversion
    carries over from the original. A model card, and files that only one of both has, decide nothing; but for those
    that stock code obeys where it finds them."""
    problems = []
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-carried-") as scratch:
        carry_over(original, Path(scratch))
        write_in_fp16(original, Path(scratch))
        ours = {name: Path(scratch, name) for name in present_files(Path(scratch)) if name != "SOURCE_README.md"}
        for name in sorted({*ours, *OBEYED}):
            both = [file.is_file() for file in (Path(scratch, name), folder / name)]
            if all(both):
                same = ours[name].read_bytes() == (folder / name).read_bytes()
            else:
                same = not any(both) or not (name in OBEYED or "/" in name)
            if not same:
                reason = "is not what the conversion carries over from the original"
                problems.append(Problem("replay", name, reason, CONVERT_AGAIN))
    return problems


# --- certificate and audit -------------------------------------------------------------------------------------------


def recompute(
    checkpoint: Checkpoint, layout: Layout, report: Report, progress: Progress, device: Device
) -> tuple[Certificate, dict[str, bool]]:
    """Return the certificate of the files, for the same target, length and partial sums as the recorded one, and by
    tier whether its own holds."""
    recorded, target = report.certificate, report.target or "half"
    if recorded is None or target not in TARGETS or recorded.max_length < 1 or recorded.splits < 1:
        raise UserError(f"{REPORT}: its certificate names no target and length; convert the source again")
    arithmetic = Arithmetic(recorded.max_length, splits=recorded.splits)
    weights, modules = fp16_weights(checkpoint, layout), read_side_modules(checkpoint.folder)
    return bounded(weights, layout, target, arithmetic, device, progress, modules)


def check_certificate(certificate: Certificate, report: Report) -> list[Problem]:
    """Return where the recorded certificate says another thing than the recomputed one."""
    assert report.certificate is not None  # NEEDED
    recorded = {site.name: site for site in report.certificate.sites}
    problems = []
    for site in certificate.sites:
        claim = recorded.pop(site.name, None)
        if claim is None:
            problems.append(Problem("certificate", site.name, "the report has no bound for it", CONVERT_AGAIN))
        elif not agree(claim, site.bound, site.partial):
            reason = f"its bound is {site.largest:.6g} and the report says {claim.bound}"
            problems.append(Problem("certificate", site.name, reason, CONVERT_AGAIN))
    problems += [
        Problem("certificate", name, "the report bounds it, and the checkpoint has no such site", CONVERT_AGAIN)
        for name in recorded
    ]
    if report.certificate.holds != certificate.holds and not problems:
        reason = f"the report says that it {'holds' if not certificate.holds else 'does not hold'}, wrongly"
        problems.append(Problem("certificate", "certificate", reason, CONVERT_AGAIN))
    return problems + check_proof(certificate, report)


def check_proof(certificate: Certificate, report: Report) -> list[Problem]:
    """Return the worst site of a certificate that a report says to hold and that does not."""
    if report.proof != "certified" or certificate.holds:
        return []
    worst = min(certificate.sites, key=lambda site: site.headroom_bits)
    reason = f"its bound is {worst.largest:.6g}, over its limit, and the report says certified"
    return [Problem("certificate", worst.name, reason, CONVERT_AGAIN)]


def agree(claim: BoundEntry, bound: float, partial: float) -> bool:
    """Return whether recorded bounds are the recomputed ones, up to another machine's arithmetic and what carrying
    eigenvalues over from the source may add, which is twice as much where rounding has made the matrix smaller."""
    for said, found in ((claim.bound, bound), (claim.partial, partial)):
        if math.isnan(said):
            return False
        # JSON has no infinity; reports write the largest double in its place.
        if math.isinf(found) or abs(said) > 1e300:
            if not (math.isinf(found) and abs(said) > 1e300):
                return False
        elif not found * (1 - BOUND_TOLERANCE) <= said <= found * (1 + 4 * CARRIED + BOUND_TOLERANCE):
            return False
    return True


def repeat_audit(
    folder: Path, report: Report, progress: Progress, device: Device, *, data: str | None = None
) -> Mapping[str, RegimeResult]:
    """Return what every regime shows on the files as stock code loads them, on the probe that the report names."""
    said, config = report.inputs or Inputs(), load_config(folder)
    seed = said.seed or 0
    swept = any(entry.kind == SWEEP for entry in said.batches)
    chosen = probe.usable(said.chosen, config)
    inputs = probe.audit_batches(config, folder, data, seed=seed, sweep=swept, chosen=chosen, progress=progress)
    with torch.random.fork_rng(devices=[]), progress.step(f"Auditing {', '.join(REGIMES)}") as advance:
        train_mode = report.target == "train"
        return device.run(
            "audit",
            lambda place: audit_folder(
                folder, inputs=inputs, seed=seed, device=place, advance=advance, train_mode=train_mode
            ),
        )


def check_tiers(
    tiers: Mapping[str, TierEntry], certified: Mapping[str, bool], report: Report, *, ran: bool
) -> list[Problem]:
    """Return the tiers of which the report says more than the files give; certified: by tier whether its bounds hold.
    ``ran``: whether the audit was repeated, without which nothing is known of what was observed."""
    problems = []
    for name, claim in report.tiers.items():
        found = tiers.get(name)
        if found is None:
            reason = "is no tier of this program"
        elif claim.holds != (claim.proof is not None):
            reason = f"the report says that it holds: {claim.holds}, and by what: {claim.proof}"
        elif claim.proof == "certified" and found.proof != "certified" and (ran or not certified[name]):
            reason = f"the report says that it is certified, and {found.reason or 'it is only observed'}"
        elif claim.proof == "observed" and ran and not found.holds:
            reason = f"the report says that it was observed to hold, and {found.reason}"
        elif other := sorted({*claim.runtimes} - {*found.runtimes}):
            reason = f"the report says that it stands for {shown(other[0])}, which it does not"
        else:
            continue
        problems.append(Problem("tiers", name, reason, CONVERT_AGAIN))
    return problems


def check_audit(regimes: Mapping[str, RegimeResult]) -> list[Problem]:
    """Return the sites that break when the checkpoint is run."""
    broken = unsafe_sites(regimes_of(regimes), converted=True)
    return [Problem("audit", site.signal, site.reason, site.remedy) for site in broken]
