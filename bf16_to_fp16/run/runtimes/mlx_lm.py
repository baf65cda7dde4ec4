"""MLX: mlx-lm's own loader and models, every parameter in fp16, on an Apple GPU or, elsewhere, the processor.

mlx-lm reads a folder of a decoder-only model as transformers does. Its RMSNorms take eps from the config and compute in
fp32 (``mx.fast.rms_norm``). Its masks know no padding, so every row runs alone. Most of its models read the config's
keys of transformers 4 only, and take defaults in silence where transformers 5 wrote others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ...errors import UserError
from ...families.layout import Layout
from ..batch import Batch
from ..runtime import Arithmetic, Outcome, Runtime


def older_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of transformers 4 that a folder's config has by newer names only."""
    config = json.loads((folder / "config.json").read_text())
    rotary = config.get("rope_parameters") or {}
    keys: dict[str, Any] = {}
    if "full_attention" in rotary:
        keys["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        rotary = rotary["full_attention"]
    if rotary.get("rope_type", "default") != "default":
        keys["rope_scaling"] = rotary
    keys |= {key: rotary[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotary}
    layers = config.get("layer_types") or []
    if "full_attention" in layers:
        keys["sliding_window_pattern"] = layers.index("full_attention") + 1
    return {key: value for key, value in keys.items() if config.get(key) is None}


def run(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Load a folder with every parameter in fp16 and return its logits, [rows, length, vocabulary], 0 at padding."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(folder, model_config=older_keys(folder))
    except (ValueError, TypeError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{folder}: mlx-lm does not take it ({reason}); choose another --runtime") from error
    model.set_dtype(mx.float16)
    rows, types = [], {str(parameter.dtype) for _, parameter in tree_flatten(model.parameters())}
    for ids, mask in zip(batch.input_ids, batch.attention_mask.bool(), strict=True):
        logits = model(mx.array(ids[mask].numpy())[None])[0]
        types.add(str(logits.dtype))
        row = torch.zeros(len(ids), logits.shape[-1])
        row[mask] = torch.from_numpy(np.array(logits.astype(mx.float32)))
        rows.append(row)
    kinds = {kind.removeprefix("mlx.core."): None for kind in sorted(types)}
    how = "the types of all parameters and logits: MLX gives its inputs' type, and takes sums and norms in fp32 inside"
    return Outcome(torch.stack(rows), mx.default_device().type.name, Arithmetic(kinds, kinds, how))


RUNTIME = Runtime("mlx-lm", "mlx_lm", run)
