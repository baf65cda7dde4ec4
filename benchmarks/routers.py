"""How often a router chooses other experts in fp16, converted, and in bf16, as the source is, than in fp32.

    python benchmarks/routers.py

Random models of the families with experts, whose sublayers add about as much to the stream as it begins with. Stock
code runs 32 rows of 64 random ids. Prints a Markdown table: tokens with another choice in any layer, the KL to fp32
in nats over all positions, and over those of a row before its first such token.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from bf16_to_fp16 import convert  # noqa: E402

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": 1, "pad_token_id": 0}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": EIGHT | {"moe_intermediate_size": 32},
    "Olmoe": EIGHT,
    "Glm4Moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def made(name: str, folder: Path) -> Any:
    """Save a random model in bf16, and return its class."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES, **OWN[name]))
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(0, 0.15)
            if "down_proj" in path or "o_proj" in path:
                weight.mul_(300)
        model.model.embed_tokens.weight.mul_(500)
    model.to(torch.bfloat16).save_pretrained(folder)
    return type(model)


@torch.no_grad()
def run(kind: Any, folder: Path, dtype: torch.dtype, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a model's log-probabilities, fp64 [rows, positions, choices], and its experts, [layers, tokens, some]."""
    chosen: list[torch.Tensor] = []
    model = kind.from_pretrained(folder, dtype=dtype).eval()
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, inputs, output: chosen.append(output[2].sort(-1).values))
    return model(ids).logits.double().log_softmax(-1), torch.stack(chosen)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    ids = torch.randint(2, 128, (32, 64), generator=torch.Generator().manual_seed(5))
    print("| family | dtype | tokens with other experts | KL | KL before a row's first |\n|---|---|---|---|---|")
    for name in OWN:
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "source", Path(folder) / "out"
            kind = made(name, source)
            convert(source, out, run_model=False)
            wanted, experts = run(kind, source, torch.float32, ids)
            for dtype, other in ((torch.float16, out), (torch.bfloat16, source)):
                found, chosen = run(kind, other, dtype, ids)
                same = (chosen == experts).all(-1).all(0).view(ids.shape)
                each = (wanted.exp() * (wanted - found)).sum(-1)
                before = each[same.int().cumprod(1).bool()].mean()
                said = f"{int((~same).sum())} of {same.numel():,} | {each.mean():.1e} | {before:.1e}"
                print(f"| {name} | {str(dtype).removeprefix('torch.')} | {said} |", flush=True)


if __name__ == "__main__":
    main()
