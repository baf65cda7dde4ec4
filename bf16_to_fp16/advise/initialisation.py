"""How large weights should begin, and how far a checkpoint's or a config's are from that.

"Transformers without Tears" (Nguyen and Salazar, arXiv:1910.05895) draws with a standard deviation of √(2/(5h)) for a
hidden size h; MT-NLG 530B (Smith et al., arXiv:2201.11990) with √(1/(3h)); T5 gives every matrix one over the root of
its inputs, queries a further 1/√d_kv (instead of scaling the scores), and embeddings 1; most configs name 0.02 for
every matrix, whatever the width is. Training moves weights by factors of a few, so what is several times from its own
family's rule was not drawn by it, has been rescaled, or has grown.

Root mean squares stand for standard deviations: means of weights are near 0, and gains of norms compare with their 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ..checkpoint.contents import read_config
from ..errors import UserError
from ..families.configs import axis_size
from ..families.known import FAMILIES, family_of
from ..families.types import Family, Initialisation
from ..json_text import loads
from ..progress import Progress, shown_by
from ..report.screen import console
from ..wording import counted

if TYPE_CHECKING:
    from ..checkpoint.reader import Checkpoint

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


def rules_for(hidden: int) -> dict[str, Any]:
    """Return every rule for a hidden size; a family's is one number, or one each by the kind of matrix.

    Taken are heads of 64, as many as fill the hidden size, and four times as many neurons.
    """
    if hidden < 1:
        raise UserError(f"the hidden size is {hidden}; give a positive number")
    usual = {"model": hidden, "ff": 4 * hidden, "inner": hidden, "head": 64}
    rules: dict[str, Any] = {"hidden_size": hidden, "small": small(hidden), "megatron": megatron(hidden)}
    for family in FAMILIES:
        own = family.initialisation
        rules[family.name] = (
            {name: deviation(own, name, usual.__getitem__) for name in own.shown} if own.shown else own.default
        )
    return rules


def deviation(
    rules: Initialisation, module: str, length: Callable[[str], int], factor: float | None = None
) -> float | None:
    """Return the standard deviation with which a module begins, None where the rules have none.

    length: gives the number of elements along a named axis. factor: the config's.
    """
    names = (module, module.rpartition(".")[2])
    drawn = next((d for p, d in rules.modules.items() if any(fnmatchcase(name, p) for name in names)), None)
    if drawn is None:
        return None
    root = math.prod(map(length, drawn.over)) ** -0.5
    return root * (rules.default if factor is None else factor) if drawn.scaled else root


def advise_init(
    source: str | Path,
    *,
    tensors: Sequence[str] = (),
    subfolder: str | None = None,
    progress: Progress | bool | None = None,
) -> dict[str, Any]:
    """Return the rules for a hidden size, and how far a config or each tensor of a checkpoint is from them.

    source: folder or Hub id, a config (a ``.json`` or a folder without weights) of any transformer, or a hidden size
    such as "14336". tensors: names with wildcards. In ``tensors`` of the result ``times`` is ``rms`` over ``own_rule``,
    the family's, and ``far`` is 4 times either way. Raises UserError for a source that cannot be read or is of no known
    family.
    """
    text = str(source)
    result: dict[str, Any] = {"mode": "init", "source": text, "config": None, "tensors": [], "far": []}
    if text.isdigit() and not Path(text).exists():
        if subfolder is not None or tensors:
            unused = "subfolder" if subfolder is not None else "tensor"
            raise UserError(f"{text} is a hidden size, of which there is no {unused}; leave out --{unused}")
        return result | {"source": None, "rules": rules_for(int(text))}
    if (config := config_alone(Path(source).expanduser())) is not None:
        judged = judged_config(config, text)
        return result | {
            "family": config.get("model_type"),
            "rules": rules_for(judged["hidden_size"]),
            "config": judged,
        }
    from .weights import chosen, open_weights  # not for a width or a config, which need no torch

    checkpoint = open_weights(source, subfolder)
    if not checkpoint.config:
        raise UserError(f"{source}: a file alone does not say what its tensors are; give the folder")
    try:
        family = family_of(checkpoint.config)
    except UserError as error:
        raise UserError(f"{checkpoint.source}/{error}") from None
    hidden = axis_size(family, checkpoint.config, "model")
    names = chosen(checkpoint, tensors)
    with shown_by(progress).step("Measuring the weights") as advance:
        for place, name in enumerate(names):
            result["tensors"].append(beside_rules(checkpoint, family, name, hidden))
            advance(place + 1, len(names))
    return result | {
        "source": checkpoint.source,
        "family": family.name,
        "rules": rules_for(hidden),
        "config": judged_config(checkpoint.config, checkpoint.source, hidden),
        "far": [row["name"] for row in result["tensors"] if row["far"]],
    }


def beside_rules(checkpoint: Checkpoint, family: Family, name: str, hidden: int) -> dict[str, Any]:
    from .weights import tensor_pieces

    square, elements, broken = 0.0, 0, 0
    for part in tensor_pieces(checkpoint, name):
        finite = part[part.isfinite()]
        square += float(finite.double().square().sum())
        elements += finite.numel()
        broken += part.numel() - finite.numel()
    rms = math.sqrt(square / elements) if elements else 0.0
    module, _, kind = name.rpartition(".")
    rule = None  # biases begin at 0
    if kind == "weight":
        own, length = family.initialisation, partial(axis_size, family, checkpoint.config)
        factor = checkpoint.config.get(own.factor)
        rule = deviation(own, module, length, float(factor) if factor else None)
    times = None if rule is None else rms / rule
    matrix = len(checkpoint.tensors[name].shape) > 1
    return {
        "name": name,
        "elements": elements + broken,
        "nonfinite": broken,
        "rms": rms,
        "own_rule": rule,
        "times": times,
        "far": broken > 0 or (times is not None and not 1 / FAR <= times <= FAR),
        "times_small": rms / small(hidden) if matrix else None,
        "times_megatron": rms / megatron(hidden) if matrix else None,
    }


def config_alone(path: Path) -> dict[str, Any] | None:
    """Return the config of a ``.json`` or of a folder without weights; None for a checkpoint."""
    if path.is_dir():
        weights = any(path.glob("*.safetensors*")) or any(path.glob("*.bin*"))
        return None if weights or not (path / "config.json").is_file() else read_config(path)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        config = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON; give a config.json or a folder with one") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: not a config; give a config.json or a folder with one")
    return config


def judged_config(config: Mapping[str, Any], name: str, hidden: int | None = None) -> dict[str, Any]:
    """Return the deviation with which a config's weights begin beside the rule for its width.

    ``stated``: by the config, else the default of its class. ``fits``: the width that the deviation fits, None where it
    goes with the width. ``wanted``: the value that has the rule's deviation.
    """
    from transformers import CONFIG_MAPPING

    inner: Mapping[str, Any] = config
    if hidden is None:
        inner, hidden = _width(config, name)
    kind = str(inner.get("model_type", config.get("model_type", "")))
    drawn_by = [f.initialisation for f in FAMILIES if kind == f.model_type or kind in f.initialisation.alike]
    scaled = any(rule.goes_with_width for rule in drawn_by)
    keys = DEVIATIONS[2:] if scaled else DEVIATIONS[:2]
    stated = next((key for key in keys if key in inner), None)
    default = CONFIG_MAPPING[kind]() if stated is None and kind in CONFIG_MAPPING else None
    key = stated or next((key for key in keys if hasattr(default, key)), None)
    if key is None:
        raise UserError(f"{name}: neither it nor its class names {DEVIATIONS[0]}, {DEVIATIONS[1]} or {DEVIATIONS[2]}")
    value = inner[key] if stated else getattr(default, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{name}: {key} is {value!r}; it must be a positive number")
    drawn = value / math.sqrt(hidden) if scaled else float(value)
    times = value if scaled else drawn / megatron(hidden)
    return {
        "key": key,
        "value": float(value),
        "stated": stated is not None,
        "hidden_size": hidden,
        "deviation": drawn,
        "times_megatron": drawn / megatron(hidden),
        "times_small": drawn / small(hidden),
        "fits": None if scaled else round(1 / (3 * drawn**2)),
        "wanted": 1.0 if scaled else megatron(hidden),
        "far": not 1 / FAR <= times <= FAR,
    }


def _width(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], int]:
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


def print_init(result: Mapping[str, Any]) -> None:
    screen = console()
    rules = result["rules"]
    known = Table("rule", f"standard deviation at h = {rules['hidden_size']:,}")
    known.add_row("Transformers without Tears, √(2/(5h))", f"{rules['small']:.3g}")
    known.add_row("MT-NLG 530B, √(1/(3h))", f"{rules['megatron']:.3g}")
    by_rule: dict[str, list[str]] = {}
    for family in FAMILIES:
        own = rules[family.name]
        rule = f"{own:g}" if not isinstance(own, Mapping) else ", ".join(f"{name} {x:.3g}" for name, x in own.items())
        by_rule.setdefault(rule, []).append(family.title)
    for rule, (title, *others) in by_rule.items():
        known.add_row(f"{title} and {counted(len(others), 'other')}" if others else title, rule)
    screen.print(known)
    if (config := result["config"]) is not None:
        stated = "" if config["stated"] else " (its class's default)"
        fits = "as at every width" if config["fits"] is None else f"and fits h = {config['fits']:,}"
        said = (
            f"{config['key']} {config['value']:g}{stated} draws with {config['deviation']:.3g}, which is"
            f" {config['times_megatron']:.2g} times MT-NLG's rule at h = {config['hidden_size']:,}, {fits}"
        )
        if config["far"]:
            said += f": over {FAR:g} times off; for new weights set {config['key']} to {config['wanted']:.3g}"
        screen.print(said, markup=False)
    if not result["tensors"]:
        return
    rows = Table("tensor", "root mean square", f"times {result['family']}'s own rule", title=result["source"])
    for row in result["tensors"]:
        if row["own_rule"] is not None:
            times = f"{row['times']:,.0f}" if row["times"] >= 99.5 else f"{row['times']:.2g}"
            rows.add_row(row["name"], f"{row['rms']:.3g}", times + " !" * row["far"])
    screen.print(rows)
    far = [row for row in result["tensors"] if row["far"]]
    if not far:
        screen.print(f"all within {FAR:g} times the rule of the family")
    if broken := [row for row in far if row["nonfinite"]]:
        most = max(broken, key=lambda row: row["nonfinite"])
        holds = f"{counted(len(broken), 'tensor')} with inf or NaN, most {most['name']}"
        screen.print(f"{holds}: {counted(most['nonfinite'], 'weight')}", markup=False)
    for word, sign in (("larger", 1), ("smaller", -1)):
        factors = {r["name"]: max(r["times"], 1e-300) ** sign for r in far if r["times"] is not None}
        factors = {name: value for name, value in factors.items() if value > FAR}
        if factors:
            worst = max(factors, key=factors.__getitem__)
            what = f"{counted(len(factors), 'tensor')} over {FAR:g} times {word} than drawn"
            screen.print(f"{what}, most {worst}: {factors[worst]:.3g} times", markup=False)
    if any((row["times"] or 0) > FAR for row in far):
        screen.print("Large weights that write the residual stream make it large: bf16-to-fp16 certify says how large.")
