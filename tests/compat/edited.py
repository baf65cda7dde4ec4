"""Runs one folder's weights under many configs by stock code alone, in whichever environment runs it.

``python edited.py FOLDER CONFIGS.json OUT.json``: OUT gets ``keys``, those that the first config's stock class knows,
and ``logits``: for each config what stock code gives in fp32 on the same few ids, null where it raises.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers


def main() -> None:
    folder, given, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    configs = json.loads(given.read_text())
    kind = transformers.CONFIG_MAPPING[configs[0]["model_type"]]
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "model.safetensors", scratch)
        logits = [logits_of(Path(scratch), config) for config in configs]
    out.write_text(json.dumps({"keys": sorted({*vars(kind()), *kind.attribute_map}), "logits": logits}))


def logits_of(folder: Path, config: dict[str, object]) -> list[object] | None:
    (folder / "config.json").write_text(json.dumps(config))
    ids = torch.arange(24).reshape(2, 12) * 3 % 90
    try:
        torch.manual_seed(0)
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits: list[object] = model.eval()(input_ids=ids, decoder_input_ids=ids.flip(0)[:, :7])[0].tolist()
    except Exception:
        return None
    return logits


if __name__ == "__main__":
    main()
