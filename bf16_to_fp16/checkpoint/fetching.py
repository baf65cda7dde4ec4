"""Fetch files of a Hub repository to the client's cache: the small ones, then the weights. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..json_text import loads
from .contents import SINGLE_OR_SHARDED
from .files import read_json
from .hub import reading_from

SMALL_FILES = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "README.md",
)  # patterns of a Hub repository's files other than weights


def download(source: str, subfolder: str | None, endpoint: str | None = None) -> tuple[Path, str]:
    """Fetch a repository's small files and the weights that stock code would use; return the folder and its commit."""
    inside, (folder, commit) = f"{subfolder}/" if subfolder else "", fetched(source, SMALL_FILES, endpoint)
    modules = [f"{name}/*" for name in module_folders(folder)]
    for name in SINGLE_OR_SHARDED:
        names = [inside + name]
        if name.endswith(".index.json"):
            index = folder / inside / name
            if not index.exists():
                continue
            placed = read_json(index, "index").get("weight_map")
            names = [inside + str(shard) for shard in set(placed.values())] if isinstance(placed, dict) else names
        folder, _ = fetched(source, (*SMALL_FILES, *modules, *names), endpoint, commit)
        if (folder / names[0]).exists():
            break
    return folder, commit


def fetched(
    source: str, patterns: Sequence[str], endpoint: str | None = None, commit: str | None = None
) -> tuple[Path, str]:
    """Fetch the files that match ``patterns``; return the snapshot's folder and its commit."""
    from huggingface_hub import snapshot_download

    repo, _, revision = source.partition("@")
    at = commit or revision or None
    folder = reading_from(
        repo,
        at,
        lambda: Path(snapshot_download(repo, revision=at, allow_patterns=list(patterns), endpoint=endpoint)),
        endpoint,
    )
    return folder, folder.name


def hub_files(source: str, folder: Path, endpoint: str | None = None) -> dict[str, int]:
    """Return a repository's files with their sizes; without a network those of the snapshot ``folder``."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    if constants.HF_HUB_OFFLINE:
        return {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    repo = source.partition("@")[0]

    def tree() -> dict[str, int]:
        entries = HfApi(endpoint=endpoint).list_repo_tree(repo, revision=folder.name, recursive=True)
        return {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}

    return reading_from(repo, folder.name, tree, endpoint)


def module_folders(folder: Path) -> list[str]:
    try:
        listing = loads((folder / "modules.json").read_text(encoding="utf-8"))
        return [str(module["path"]) for module in listing if module["path"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
