"""A converted checkpoint in other runtimes, in fp16, beside its source there and stock code in bf16.

    python benchmarks/runtimes.py OUT SOURCE [RUNTIME ...]     by default every runtime that is installed

All weights are compared with stock code in fp32 on the same weights, so that what is measured is the arithmetic of the
runtime. A runtime that is asked for fp16 may compute in fp32 all the same, so each also says in which format its
products ran: "no evidence" where that was not fp16. Every runtime sees one batch of fixed shape: int64 ids and the
encoder's mask. The decoder's rows are padded at their end only, where its causal mask keeps them from mattering.

``mlx-lm`` reads the folder by its own converter, ``onnxruntime`` by torch's ONNX export.
``onnx-reference`` computes the ONNX file in numpy, every operation in fp16, norms and softmaxes included.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from results import print_header, print_row
from torch import Tensor, nn

from bf16_to_fp16.checkpoint.reader import open_checkpoint
from bf16_to_fp16.families.layout import Layout
from bf16_to_fp16.measuring import probe, stock
from bf16_to_fp16.measuring.agreement import agreed_layout
from bf16_to_fp16.measuring.batch import Batch, values_of
from bf16_to_fp16.measuring.stock import load, load_config

FP16 = "float16"

Products = Mapping[str, int | None]
"""How many matrix products a runtime computed in each format; None where one format serves all."""

Outcome = tuple[Tensor, Products]  # values in fp32, [rows, length, channels], and the products that made them


class Outputs(nn.Module):
    """A stock model as a function of its ids alone, which returns one tensor: logits, or last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        options: dict[str, Any] = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        if options or stock.is_causal(stock.config_of(self.model)):
            options["use_cache"] = False
        return values_of(self.model(input_ids=input_ids, attention_mask=attention_mask, **options))


def inputs_of(batch: Batch) -> dict[str, Tensor]:
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return inputs if batch.decoder_input_ids is None else inputs | {"decoder_input_ids": batch.decoder_input_ids}


def arrays_of(batch: Batch) -> dict[str, Any]:
    return {name: ids.numpy() for name, ids in inputs_of(batch).items()}


def as_function(folder: Path, dtype: torch.dtype) -> Outputs:
    return Outputs(load(folder, torch.float32).to(dtype)).eval()


@contextmanager
def tracing() -> Iterator[None]:
    """Take no gradients, and keep back the warnings of a trace: what depends on shapes is right for those that run."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


def one_batch(config: Any, folder: Path) -> Batch:
    """Return the audit's batch of padded rows, for what is built for one shape."""
    inputs = probe.audit_batches(config, folder, None)
    return next(batch for batch in inputs if not batch.generate and not batch.attention_mask.all())


# --- MLX: its masks know no padding, so every row runs alone ----------------------------------------------------------


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


def mlx_lm(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    """Load a folder with every parameter in fp16 and return its logits, [rows, length, vocabulary], 0 at padding."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    model, _ = load_model(folder, model_config=older_keys(folder))
    model.set_dtype(mx.float16)
    rows, types = [], {str(parameter.dtype) for _, parameter in tree_flatten(model.parameters())}
    for ids, mask in zip(batch.input_ids, batch.attention_mask.bool(), strict=True):
        logits = model(mx.array(ids[mask].numpy())[None])[0]
        types.add(str(logits.dtype))
        row = torch.zeros(len(ids), logits.shape[-1])
        row[mask] = torch.from_numpy(np.array(logits.astype(mx.float32)))
        rows.append(row)
    return torch.stack(rows), {kind.removeprefix("mlx.core."): None for kind in sorted(types)}


# --- an ONNX file -----------------------------------------------------------------------------------------------------


def export(folder: Path, batch: Batch, place: str) -> str:
    """Write the checkpoint in ``folder``, every parameter in fp16, as an ONNX file for the shapes of a batch."""
    inputs, function, path = inputs_of(batch), as_function(folder, torch.float16), f"{place}/model.onnx"
    names: dict[str, Any] = {"input_names": list(inputs), "output_names": ["output"]}
    with tracing():
        # The other exporter takes ten times as long, and gives the same function.
        torch.onnx.export(function, tuple(inputs.values()), path, **names, dynamo=False)
    return path


# --- the ONNX reference: a product is accumulated in fp32 and rounded once --------------------------------------------


def all_in_fp16(model: Any) -> None:
    """Turn what is fp32 in an ONNX model into fp16, constants and casts too."""
    from onnx import TensorProto, numpy_helper

    attributes = [(node.op_type, attribute) for node in model.graph.node for attribute in node.attribute]
    for tensor in (*model.graph.initializer, *(attribute.t for _, attribute in attributes if attribute.HasField("t"))):
        if tensor.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    for kind, attribute in attributes:
        if kind == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.FLOAT16


def onnx_reference(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    import onnx
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class MatMul(OpRun):
        def _run(self, a: Any, b: Any) -> tuple[Any]:
            return (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),)

    with TemporaryDirectory() as place:
        model = onnx.load(export(folder, batch, place))
    all_in_fp16(model)
    with np.errstate(all="ignore"):  # infinities are what is looked for
        results = ReferenceEvaluator(model, new_ops=[MatMul]).run(None, arrays_of(batch), intermediate=True)
    assert isinstance(results, dict)
    products = (node for node in model.graph.node if node.op_type in ("MatMul", "Gemm"))
    kinds = Counter(str(results[node.output[0]].dtype) for node in products)
    return torch.from_numpy(results["output"]).float(), kinds


# --- ONNX Runtime: only its profile tells what it computed in fp16 ----------------------------------------------------

ONNX_TYPES = {"float16": "float16", "float": "float32", "double": "float64"}
PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")


def onnxruntime(folder: Path, layout: Layout, batch: Batch) -> Outcome:
    import onnxruntime as library

    options = library.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 3
    usable = [name for name in PROVIDERS if name in library.get_available_providers()]
    with TemporaryDirectory() as place:
        options.profile_file_prefix = f"{place}/profile"
        session = library.InferenceSession(export(folder, batch, place), options, providers=usable)
        (output,) = session.run(None, arrays_of(batch))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return torch.from_numpy(output).float(), products_of_profile(events)


def products_of_profile(events: Iterable[Mapping[str, Any]]) -> Products:
    products: Counter[str] = Counter()
    for event in events:
        details = event.get("args", {})
        name = details.get("op_name", "")
        if event.get("cat") == "Node" and ("MatMul" in name or "Gemm" in name or name.endswith("Attention")):
            kinds = (kind for entry in details.get("input_type_shape", ()) for kind in entry)
            products.update(kind for kind in (ONNX_TYPES.get(next(kinds, "")),) if kind)
    return products


# --- all of them ------------------------------------------------------------------------------------------------------

RUNTIMES: dict[str, tuple[str, Callable[[Path, Layout, Batch], Outcome]]] = {
    "mlx-lm": ("mlx_lm", mlx_lm),
    "onnx-reference": ("onnx", onnx_reference),
    "onnxruntime": ("onnxruntime", onnxruntime),
}
"""Each runtime with the package that it needs."""


def compared(values: Tensor, wanted: Tensor, mask: Tensor) -> dict[str, float]:
    """Return how many values are not finite, how many are 0, and Σ(x − fp32)² / Σ fp32², where the mask says so."""
    there, wanted = values[mask.bool()].double(), wanted[mask.bool()].double()
    error = float((there - wanted).square().sum() / wanted.square().sum())
    return {"nonfinite": int((~there.isfinite()).sum()), "zeros": int((there == 0).sum()), "error": error}


def measure(out: Path, source: Path, name: str) -> dict[str, Any]:
    """Run a checkpoint and its source in a runtime, and return the products, the three comparisons and a verdict."""
    found: dict[str, Any] = {"runtime": name}
    config = load_config(source)
    batch = one_batch(config, source)
    mask = batch.attention_mask if batch.decoder_attention_mask is None else batch.decoder_attention_mask

    @torch.no_grad()
    def expected(folder: Path, dtype: torch.dtype) -> Tensor:
        return as_function(folder, dtype)(*inputs_of(batch).values()).float()

    for side, folder in (("source", source), ("output", out)):
        values, products = RUNTIMES[name][1](folder, agreed_layout(open_checkpoint(folder)), batch)
        found[side] = compared(values, expected(folder, torch.float32), mask)
    found["bf16"] = compared(expected(source, torch.bfloat16), expected(source, torch.float32), mask)
    worse = found["output"]["nonfinite"] or not found["output"]["error"] <= found["bf16"]["error"]
    verdict = "unsafe" if worse else "safe" if set(products) == {FP16} else "no evidence"
    return found | {"products": products, "verdict": verdict}


def main() -> None:
    out, source, *names = sys.argv[1:]
    sides = ("source", "output", "bf16")
    print_header("runtime", "products", *sides, "verdict")
    for name in names or [name for name, (package, _) in RUNTIMES.items() if find_spec(package)]:
        found = measure(Path(out), Path(source), name)
        products = ", ".join(f"{number or ''} {kind}".strip() for kind, number in found["products"].items())
        shown = [f"{found[s]['nonfinite']} not finite, {found[s]['error']:.2e}" for s in sides]
        print_row(name, products, *shown, found["verdict"])


if __name__ == "__main__":
    main()
