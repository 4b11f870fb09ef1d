"""Hugging Face's Llama with version 1's initial weights and batches: an implementation that shares no code with ours.

    PYTHONPATH=scripts:tests python tests/versions/huggingface.py > tests/versions/huggingface.json

writes the golden values that test_pins.py compares all four versions with. It needs pip install '.[pin]'.
"""

import contextlib
import importlib.metadata
import json
import pathlib
import re
from unittest import mock

import torch
import torch.nn.functional as F

from common.peers import CANONICAL
from common.versions import load_version

GOLDEN = pathlib.Path(__file__).with_suffix(".json")
STEPS = 5
SIZES = ("hidden-dim", "num-layers", "num-heads", "num-kv-heads", "intermediate-dim", "vocab-size", "seq-len")
CASES = {  # SIZES and batch size; head sizes 16, 32, 64 and 128, which all four versions take
    "one key/value head": (48, 2, 3, 1, 71, 51, 19, 2),
    "as many as query heads": (64, 1, 2, 2, 33, 101, 7, 2),
    "one token": (64, 1, 1, 1, 50, 37, 1, 5),
    "head size 128": (256, 1, 2, 1, 35, 77, 13, 1),
    "long": (64, 1, 4, 2, 9, 1003, 100, 1),
}


def options(case):
    """Return the command line of a case."""
    sizes = [*zip(SIZES, CASES[case], strict=False), ("batch-size", CASES[case][-1]), ("learning-rate", "1e-2")]
    return [word for name, size in sizes for word in (f"--{name}", str(size))] + ["--seed", "5", "--no-graph"]


@contextlib.contextmanager
def float64_throughout():
    """Compute in float64 what both implementations ask float32 for: norms, softmax, RoPE angles, loss."""
    from transformers.models.llama import modeling_llama

    class Torch:
        float = float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    double = mock.patch.object(torch.Tensor, "float", torch.Tensor.double)
    with double, mock.patch.object(modeling_llama, "torch", Torch()):
        yield


def build(config, attention="eager"):
    """Return LlamaForCausalLM of a config's sizes, with weights yet to be loaded."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_dim, "rms_norm_eps": 1e-6}
    sizes |= {"intermediate_size": config.intermediate_dim, "num_hidden_layers": config.num_layers}
    sizes |= {"num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    rest = {"tie_word_embeddings": True, "attn_implementation": attention, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **rope, **rest))


def canonical(model):
    """Return {version 1's name: parameter}."""
    names = {name: name.removeprefix("model.").split(".") for name, _ in model.named_parameters()}
    return {".".join(CANONICAL.get(part, part) for part in names[n]): p for n, p in model.named_parameters()}


def outcome(case, attention="eager", dtype=torch.float32):
    """Return logits, loss and gradients of the first batch, and losses and weights of five AdamW steps."""
    script = load_version(1)
    config = script.parse_options([*options(case), "--device", "cpu"])
    model, data = build(config, attention).to(dtype), script.load_data(config)
    weights = canonical(model)
    with torch.no_grad():
        for name, weight in script.Trainer(config).initial["tensors"].items():
            weights.pop(name).copy_(weight)
    assert not weights, f"not initialised: {list(weights)}"
    optimizer, losses, first = torch.optim.AdamW(model.parameters(), lr=config.learning_rate), [], {}
    for step in range(STEPS):
        tokens, labels = script.batch(data, step, config)
        optimizer.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        if not step:
            first = {"logits": logits.detach(), "loss": loss.item()}
            first["gradients"] = {name: p.grad.clone() for name, p in canonical(model).items()}
        optimizer.step()
    return first | {"losses": losses, "weights": {name: p.detach() for name, p in canonical(model).items()}}


def fingerprint(tensor):
    """Return the norm of a tensor and its projection on a fixed vector of norm one, which any reordering changes."""
    flat = tensor.detach().double().cpu().flatten()
    pattern = torch.cos(torch.arange(len(flat), dtype=torch.float64) ** 2)
    return [float(f"{number:.9g}") for number in (flat.norm().item(), (flat @ pattern / pattern.norm()).item())]


def golden():
    content = {"transformers": importlib.metadata.version("transformers"), "torch": torch.__version__, "cases": {}}
    for case in CASES:
        found = outcome(case)
        tensors = {"logits": found["logits"], **found["gradients"]}
        prints = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        content["cases"][case] = {"options": " ".join(options(case)), "losses": found["losses"], "fingerprints": prints}
    return content


if __name__ == "__main__":
    print(re.sub(r"\[[^][]+\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(golden(), indent=1)))
