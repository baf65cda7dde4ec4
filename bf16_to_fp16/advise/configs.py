"""What a config says of how its weights begin, beside the published rules for its width.

Most configs of transformers name one standard deviation for every matrix, 0.02 since BERT, whatever the width is. The
rule √(1/(3h)) of MT-NLG 530B (Smith et al., arXiv:2201.11990) falls with it: 0.02 fits h = 833, and at h = 14,336 it is
4.1 times the rule. T5's factor multiplies a rule that goes with the width already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.contents import read_config
from ..errors import UserError
from ..families.known import FAMILIES
from ..json_text import loads

WIDTHS = ("hidden_size", "d_model", "n_embd", "n_embed", "dim")  # what configs call the hidden size

DEVIATIONS = ("initializer_range", "init_std", "initializer_factor")
"""What they call the standard deviation of every matrix, and last the factor of T5's rule."""

FAR = 4.0  # times a rule, either way, from which a weight or a config is flagged


def small(hidden: int) -> float:
    """Return √(2/(5h)), the "small init" of Transformers without Tears."""
    return math.sqrt(2 / (5 * hidden))


def megatron(hidden: int) -> float:
    """Return √(1/(3h)), the initialisation of MT-NLG 530B."""
    return math.sqrt(1 / (3 * hidden))


def config_alone(source: str | Path) -> tuple[dict[str, Any], str] | None:
    """Return the config of a ``.json`` file, or of a folder without weights, and its model type; None for a checkpoint.

    Raises UserError for a file that is no config.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() or any(path.glob("*.safetensors*")) or any(path.glob("*.bin*")):
            return None
        config = read_config(path)
    elif path.suffix == ".json" and path.is_file():
        try:
            config = loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: not JSON; give a config.json or a folder with one") from error
        if not isinstance(config, dict):
            raise UserError(f"{path}: not a config; give a config.json or a folder with one")
    else:
        return None
    return dict(config), str(config.get("model_type", ""))


def judged_config(config: Mapping[str, Any], name: str, hidden: int | None = None) -> dict[str, Any]:
    """Return how a config's weights begin beside the rule for its width.

    ``key``, ``value``, ``stated`` (else the class's default), ``hidden_size``, ``deviation``, how many times √(1/(3h))
    and √(2/(5h)) that is (``times_megatron``, ``times_small``), the width that it fits (``fits``, None where it goes
    with the width), ``wanted`` (the value that has the rule's deviation, or T5's own) and ``far``. name: of the config
    in errors; hidden: its width, where that is known. Raises UserError where it names no width or no deviation.
    """
    inner: Mapping[str, Any] = config
    if hidden is None:
        inner, hidden = _width(config, name)
    kind = str(inner.get("model_type", config.get("model_type", "")))
    drawn_by = [f.initialisation for f in FAMILIES if kind == f.model_type or kind in f.initialisation.alike]
    scaled = any(rule.goes_with_width for rule in drawn_by)
    key, value, stated = _deviation(inner, kind, scaled)
    if key is None:
        raise UserError(f"{name}: neither it nor its class names {DEVIATIONS[0]}, {DEVIATIONS[1]} or {DEVIATIONS[2]}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name}: {key} is {value!r}; it must be a positive number")
    drawn = value / math.sqrt(hidden) if scaled else float(value)
    times = value if scaled else drawn / megatron(hidden)
    return {
        "key": key,
        "value": float(value),
        "stated": stated,
        "hidden_size": hidden,
        "deviation": drawn,
        "times_megatron": drawn / megatron(hidden),
        "times_small": drawn / small(hidden),
        "fits": None if scaled else round(1 / (3 * drawn**2)),
        "wanted": 1.0 if scaled else megatron(hidden),
        "far": not 1 / FAR <= times <= FAR,
    }


def _width(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], int]:
    """Return the config that names a hidden size, this or one inside it, and the size."""
    inside = [config.get(key) for key in ("text_config", "llm_config", "decoder", "encoder")]
    for each in (config, *(part for part in inside if isinstance(part, Mapping))):
        key = next((key for key in WIDTHS if key in each), None)
        if key is None:
            continue
        hidden = each[key]
        if not isinstance(hidden, int) or isinstance(hidden, bool) or hidden < 1:
            raise UserError(f"{name}: {key} is {hidden!r}; it must be a positive whole number")
        return each, hidden
    raise UserError(f"{name}: no {', '.join(WIDTHS[:3])}; give the config of a transformer")


def _deviation(config: Mapping[str, Any], kind: str, scaled: bool) -> tuple[str | None, Any, bool]:
    """Return the key and value that say how weights begin, and whether the config itself does."""
    known = DEVIATIONS[2:] if scaled else DEVIATIONS[:2]
    for key in known:
        if key in config:
            return key, config[key], True
    from transformers import CONFIG_MAPPING

    if kind in CONFIG_MAPPING:
        default = CONFIG_MAPPING[kind]()
        for key in known:
            if hasattr(default, key):
                return key, getattr(default, key), False
    return None, None, False
