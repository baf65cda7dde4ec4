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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import probe
from .auditing import REGIMES, RegimeResult, audit_folder, broken_sites, load_config
from .certificate import Arithmetic, Certificate, bound, served
from .checkpoint import (
    Checkpoint,
    bytes_of,
    contained,
    looks_like_repo_id,
    open_checkpoint,
    own_name,
    read_json,
    within,
)
from .conversion import LONGEST_REPORT, REPORT, TARGETS
from .environment import SCHEMA, environment
from .errors import UserError
from .families import resolve
from .families.types import Layout
from .folder import sha256_of
from .hub import reading_from
from .rescaling import Plan, exponents_of, writes
from .talk import Talk
from .writer import write_fp16

SHAPES: Mapping[str, type] = {
    "verdict": str,
    "source.sha256": dict,
    "source.config_changes": dict,
    "output.files": list,
    "plan": dict,
    "certificate.sites": list,
}
"""What a report must have to be checked."""

CHECKS = ("files", "plan", "replay", "certificate", "audit")

BOUND_TOLERANCE = 1e-3
"""Relative difference of a recomputed bound that another machine's arithmetic may make."""

UNITS = ("B", "kB", "MB", "GB", "TB")

CONVERT_AGAIN = "fetch it again, or convert the source again"


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


def verify(
    source: str | Path,
    *,
    original: str | Path | None = None,
    data: str | None = None,
    run_model: bool = True,
    endpoint: str | None = None,
    talk: Talk | None = None,
) -> dict[str, Any]:
    """Check a converted checkpoint (folder or Hub id) against its report and return what was found.

    original: the source (folder or Hub id) that the recorded plan is replayed on. data: text to audit on besides the
    built-in probe. run_model: False leaves the audit out. endpoint: the Hub's address. ``verdict`` is "safe" where
    every check holds and the report itself says so; ``problems`` names the others. Raises UserError for a source that
    is not a converted checkpoint.
    """
    talk = talk or Talk(quiet=True)
    if data is not None and not run_model:
        raise UserError("data is of no use where nothing is run; leave out either --data or --no-audit")
    folder, revision, extra = locate(source, endpoint, talk)
    report = read_report(folder)
    if original is not None and "finetune" in report:
        raise UserError(f"{source} was finetuned, so no plan leads to it from the original; leave out --original")
    outcome = dict.fromkeys(CHECKS, "not run")
    regimes: Mapping[str, RegimeResult] = {}
    certificate: Certificate | None = None
    with talk.step("Hashing the files") as advance:
        problems = check_files(folder, report, extra=extra, progress=advance)
    outcome["files"] = "failed" if problems else "passed"
    if not problems:
        checkpoint = open_checkpoint(folder)
        layout = resolve(checkpoint)
        problems += tried(outcome, "plan", check_plan(checkpoint, layout, report))
        if original is not None:
            origin = open_checkpoint(original, endpoint=endpoint)
            problems += tried(outcome, "replay", replay(origin, checkpoint, report, talk))
        certificate = recompute(checkpoint, layout, report, talk)
        problems += tried(outcome, "certificate", check_certificate(certificate, report))
        if run_model:
            regimes = repeat_audit(folder, report, talk, data=data)
            problems += tried(outcome, "audit", check_audit(regimes))
    if report["verdict"] != "safe":
        problems.append(
            Problem("report", REPORT, "says itself that the checkpoint is unsafe", "finetune it, or stay with bf16")
        )
    return {
        "schema": SCHEMA,
        "verdict": "unsafe" if problems else "safe",
        "verified": not problems,
        "source": {"path": str(source) if revision is not None else own_name(source), "revision": revision},
        "report": {"verdict": report["verdict"], "proof": report.get("proof"), "family": report.get("family")},
        "checks": outcome,
        "problems": [asdict(problem) for problem in problems],
        "files": len(listed_files(report)),
        "certificate": None
        if certificate is None
        else {key: value for key, value in certificate.to_json().items() if key != "sites"},
        "regimes": {name: result.to_json() for name, result in regimes.items()},
        "environment": environment(),
    }


def tried(outcome: dict[str, str], check: str, problems: list[Problem]) -> list[Problem]:
    """Note how a check ended, and return its problems."""
    outcome[check] = "failed" if problems else "passed"
    return problems


# --- where it lies ---------------------------------------------------------------------------------------------------


def locate(source: str | Path, endpoint: str | None, talk: Talk) -> tuple[Path, str | None, list[str]]:
    """Return the folder of a converted checkpoint, the commit that a Hub id stood for (else None), and the files of
    its repository that its report does not know."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder, None, []
    if folder.exists() or not looks_like_repo_id(str(source)):
        problem = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"{folder} {problem}; give a converted folder or a Hub id like org/name")
    return fetch(str(source), endpoint, talk)


def fetch(source: str, endpoint: str | None, talk: Talk) -> tuple[Path, str, list[str]]:
    """Download what a repository's report lists and nothing else; return the folder, the commit, and the names of the
    repository's other files.

    Raises UserError for a repository without a report, and where the disk has no room for it.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.hf_api import RepoFile

    repo, _, asked = source.partition("@")
    api = HfApi(endpoint=endpoint)

    def tree() -> tuple[str, dict[str, int]]:
        commit = str(api.repo_info(repo, revision=asked or None).sha)
        entries = api.list_repo_tree(repo, revision=commit, recursive=True)
        return commit, {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

    def download(*names: str) -> Path:
        patterns = [glob.escape(name) for name in names]
        return reading_from(
            repo,
            asked,
            lambda: Path(snapshot_download(repo, revision=commit, allow_patterns=patterns, endpoint=endpoint)),
            endpoint,
        )

    commit, sizes = reading_from(repo, asked, tree, endpoint)
    if REPORT not in sizes:
        raise UserError(
            f"{repo} has no {REPORT}, so this program did not convert it; audit and certify take any source"
        )
    folder = download(REPORT)
    listed = [str(entry["name"]) for entry in listed_files(read_report(folder))]
    wanted = [name for name in listed if name in sizes]
    nbytes = sum(sizes[name] for name in wanted if not (folder / name).exists())  # what the cache has is not fetched
    refuse_a_full_disk(repo, nbytes, Path(constants.HF_HUB_CACHE))
    with talk.step(f"Fetching {len(wanted)} files, {in_words(nbytes)}"):
        folder = download(REPORT, *wanted)
    return folder, commit, sorted(set(sizes) - {REPORT, *listed})


def refuse_a_full_disk(repo: str, nbytes: int, cache: Path) -> None:
    """Raise UserError where the disk of ``cache`` has no room for so many bytes."""
    place = cache
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise UserError(
            f"{repo} needs {in_words(nbytes)} and the disk of the cache has {in_words(free)};"
            " free some space, or set HF_HOME to a folder on another disk"
        )


def in_words(nbytes: int) -> str:
    """Return a number of bytes in decimal units."""
    power = min(len(UNITS) - 1, (len(str(max(1, nbytes))) - 1) // 3)
    return f"{nbytes:,} B" if power == 0 else f"{nbytes / 1000**power:.1f} {UNITS[power]}"


def read_report(folder: Path) -> dict[str, Any]:
    """Return the report of a converted folder.

    Raises UserError where there is none, or it lacks what can be checked.
    """
    path = folder / REPORT
    if not path.is_file():
        raise UserError(f"{folder}: has no {REPORT}, so convert did not write it; give a converted folder")
    report = read_json(contained(folder, REPORT), "report", LONGEST_REPORT)
    if report.get("schema") != SCHEMA:
        raise UserError(f"{path}: schema {report.get('schema')!r} is not {SCHEMA}; use the release that wrote it")
    for keys, kind in SHAPES.items():
        if not isinstance(within(report, *keys.split(".")), kind):
            raise UserError(f"{path}: has no {keys}, so convert did not write it; convert the source again")
    inputs, changes = report.get("inputs"), within(report, "source", "config_changes")
    right = isinstance(inputs, (dict, type(None))) and all(isinstance(sides, dict) for sides in changes.values())
    right = right and all(isinstance(s, dict) and "name" in s for s in report["certificate"]["sites"])
    right = right and all(
        isinstance(entry, dict) and [type(entry.get(key)) for key in ("name", "sha256", "nbytes")] == [str, str, int]
        for entry in listed_files(report)
    )
    if not right:
        raise UserError(f"{path}: lists something that convert does not write; convert the source again")
    return report


def listed_files(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of the files that a report lists."""
    return list(report["output"]["files"])


# --- files -----------------------------------------------------------------------------------------------------------


def present_files(folder: Path) -> list[str]:
    """Return the names of all files below a folder but hidden ones, which no library reads, sorted."""
    names = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    return sorted(name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts))


def check_files(
    folder: Path, report: Mapping[str, Any], *, extra: Sequence[str] = (), progress: Any = None
) -> list[Problem]:
    """Return what differs between the files of a folder and those that its report lists.

    extra: names of further files, known to exist elsewhere in the same repository.
    """
    listed = {str(entry["name"]): entry for entry in listed_files(report)}
    if not any(map(is_weights, listed)) or "config.json" not in listed:
        return [Problem("files", REPORT, "lists no weights or no config.json", CONVERT_AGAIN)]
    owner = {str(entry["sha256"]): name for name, entry in listed.items()}
    total, done, problems = sum(int(e["nbytes"]) for e in listed.values()), 0, []
    for name, entry in listed.items():
        path = contained(folder, name)
        if not path.is_file():
            problems.append(Problem("files", name, "is missing", CONVERT_AGAIN))
            continue
        digest = sha256_of(path)
        if digest != entry["sha256"]:
            problems.append(Problem("files", name, difference(path, name, digest, entry, owner, report), CONVERT_AGAIN))
        done += int(entry["nbytes"])
        if progress is not None:
            progress(done, total)
    for name in sorted({*present_files(folder), *extra} - {REPORT, *listed}):
        if not name.startswith("."):
            reason = "is not in the report, so nothing is known of it"
            problems.append(Problem("files", name, reason, "remove it, or keep it elsewhere"))
    return problems


def difference(
    path: Path, name: str, digest: str, entry: Mapping[str, Any], owner: Mapping[str, str], report: Mapping[str, Any]
) -> str:
    """Return how a file differs from what the report says of it."""
    size, expected = path.stat().st_size, int(entry["nbytes"])
    if owner.get(digest, name) != name and is_weights(name) and is_weights(owner[digest]):
        return f"holds what belongs into {owner[digest]}: the shards are swapped"
    if name == "config.json":
        return (
            f"the config was changed{changed_keys(path, report)} (SHA-256 {digest[:12]}…, not {entry['sha256'][:12]}…)"
        )
    if size != expected:
        return f"has {size:,} bytes and the report says {expected:,}: cut short, or another file"
    kind = "the weights were changed or damaged" if is_weights(name) else "was changed or damaged"
    return f"{kind}: its {size:,} bytes have the SHA-256 {digest[:12]}…, not {entry['sha256'][:12]}…"


def is_weights(name: str) -> bool:
    """Return whether a file holds weights."""
    return name.endswith(".safetensors")


def changed_keys(path: Path, report: Mapping[str, Any]) -> str:
    """Return which of the keys that the conversion set have another value now, in words; empty for none of them."""
    try:
        config = json.loads(path.read_bytes())
        edits = report["source"]["config_changes"]
        wrong = {key: sides["after"] for key, sides in edits.items() if config.get(key) != sides.get("after")}
    except (ValueError, KeyError, AttributeError):
        return ""
    return "".join(f", {key} is {config.get(key)} instead of {value}" for key, value in wrong.items())


# --- plan ------------------------------------------------------------------------------------------------------------


def plan_of(report: Mapping[str, Any]) -> Plan:
    """Return the plan of a report; raise UserError where it holds none."""
    try:
        return Plan.model_validate(report["plan"])
    except ValueError as error:
        raise UserError(f"{REPORT}: its plan is not one of this program; convert the source again") from error


def check_plan(checkpoint: Checkpoint, layout: Layout, report: Mapping[str, Any]) -> list[Problem]:
    """Return where the recorded plan and the checkpoint contradict each other: family, signals, channels, config."""
    plan = plan_of(report)

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
    key = layout.family.eps_key
    if key is not None and plan.eps is not None and checkpoint.config.get(key) != plan.eps:
        problems.append(problem("config.json", f"{key} is {checkpoint.config.get(key)} and the plan needs {plan.eps}"))
    for name, sides in report["source"]["config_changes"].items():
        if "after" in sides and checkpoint.config.get(name) != sides["after"]:
            reason = f"{name} is {checkpoint.config.get(name)} and the report says {sides['after']}"
            problems.append(problem("config.json", reason))
    return problems


def replay(original: Checkpoint, checkpoint: Checkpoint, report: Mapping[str, Any], talk: Talk) -> list[Problem]:
    """Return where applying the recorded plan to the original does not give the checkpoint's weights, bit for bit."""
    wanted = report["source"]["sha256"]
    for file in original.weight_files:
        name = str(file.relative_to(original.folder))
        if wanted.get(name) != original.sha256(file):
            reason = "is not the file that was converted"
            return [Problem("replay", name, reason, "give --original at the revision that the report names")]
    plan = plan_of(report)
    layout = resolve(original, untie=plan.untied_head)
    with tempfile.TemporaryDirectory(prefix="bf16-to-fp16-replay-") as scratch:
        with talk.step("Replaying the plan on the original") as advance:
            write_fp16(original, writes(layout, plan), Path(scratch), progress=advance)
        (Path(scratch) / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf-8")
        again = open_checkpoint(scratch)
        differing = sorted(set(again.tensors) ^ set(checkpoint.tensors))
        for name in sorted(set(again.tensors) & set(checkpoint.tensors)):
            ours, theirs = again.read(name), checkpoint.read(name)
            if ours.dtype != theirs.dtype or ours.shape != theirs.shape or bytes_of(ours) != bytes_of(theirs):
                differing.append(name)
    reason = "is not what the plan makes of the original"
    return [Problem("replay", name, reason, CONVERT_AGAIN) for name in differing]


# --- certificate and audit -------------------------------------------------------------------------------------------


def recompute(checkpoint: Checkpoint, layout: Layout, report: Mapping[str, Any], talk: Talk) -> Certificate:
    """Return the certificate of the files, for the same target, length and partial sums as the recorded one."""
    recorded = report["certificate"]
    target, length, splits = report.get("target", "half"), recorded.get("max_length"), recorded.get("splits")
    if target not in TARGETS or type(length) is not int or length < 1 or type(splits) is not int or splits < 1:
        raise UserError(f"{REPORT}: its certificate names no target and length; convert the source again")
    with talk.step("Bounding every signal") as advance:
        return bound(
            layout, served(checkpoint, layout), Arithmetic(length, splits=splits), target=target, progress=advance
        )


def check_certificate(certificate: Certificate, report: Mapping[str, Any]) -> list[Problem]:
    """Return where the recorded certificate says another thing than the recomputed one."""
    recorded = {str(site["name"]): site for site in report["certificate"]["sites"]}
    problems = []
    for site in certificate.sites:
        claim = recorded.pop(site.name, None)
        if claim is None:
            problems.append(Problem("certificate", site.name, "the report has no bound for it", CONVERT_AGAIN))
        elif not agree(claim, site.bound, site.partial):
            reason = f"its bound is {site.largest:.6g} and the report says {claim.get('bound')}"
            problems.append(Problem("certificate", site.name, reason, CONVERT_AGAIN))
    problems += [
        Problem("certificate", name, "the report bounds it, and the checkpoint has no such place", CONVERT_AGAIN)
        for name in recorded
    ]
    if bool(report["certificate"].get("holds")) != certificate.holds and not problems:
        reason = f"the report says that it {'holds' if not certificate.holds else 'does not hold'}, wrongly"
        problems.append(Problem("certificate", "certificate", reason, CONVERT_AGAIN))
    if report.get("proof") == "certified" and not certificate.holds:
        worst = min(certificate.sites, key=lambda site: site.headroom_bits)
        reason = f"its bound is {worst.largest:.6g}, over its limit, and the report says certified"
        problems.append(Problem("certificate", worst.name, reason, CONVERT_AGAIN))
    return problems


def agree(claim: Mapping[str, Any], bound: float, partial: float) -> bool:
    """Return whether recorded bounds are the recomputed ones, up to another machine's arithmetic."""
    pairs = ((claim.get("bound"), bound), (claim.get("partial"), partial))
    for said, found in pairs:
        if not isinstance(said, (int, float)):
            return False
        # JSON has no infinity; reports write the largest double in its place.
        if math.isinf(found) or abs(said) > 1e300:
            if not (math.isinf(found) and abs(said) > 1e300):
                return False
        elif abs(said - found) > BOUND_TOLERANCE * max(abs(found), abs(said)):
            return False
    return True


def repeat_audit(
    folder: Path, report: Mapping[str, Any], talk: Talk, *, data: str | None = None
) -> Mapping[str, RegimeResult]:
    """Return what every regime shows on the files as stock code loads them, on the probe that the report names."""
    seed = (report.get("inputs") or {}).get("seed") or 0
    if type(seed) is not int:
        raise UserError(f"{REPORT}: its seed is not a number; convert the source again")
    inputs = probe.gather(load_config(folder), folder, data, seed=seed)
    with torch.random.fork_rng(devices=[]), talk.step(f"Auditing {', '.join(REGIMES)}, eager and SDPA") as advance:
        train_mode = report.get("target") == "train"
        return audit_folder(folder, inputs=inputs, seed=seed, progress=advance, train_mode=train_mode)


def check_audit(regimes: Mapping[str, RegimeResult]) -> list[Problem]:
    """Return the sites that break when the checkpoint is run."""
    return [
        Problem("audit", str(site["signal"]), str(site["reason"]), str(site["remedy"]))
        for site in broken_sites(regimes, converted=True)
    ]
