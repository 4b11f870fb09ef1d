"""Hugging Face's Llama with version 1's initial weights and batches: an implementation that shares no code with ours.

    python scripts/maintain/huggingface.py > tests/versions/huggingface.json

writes the golden values that test_pins.py and test_mixed_precision.py compare all four versions with. It needs
pip install '.[pin]'.
"""

import contextlib
import importlib.metadata
import json
import pathlib
import re
import sys
import zlib
from unittest import mock

import torch
import torch.nn.functional as F

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import progress
from common.measuring.peers import LibraryLlama, peer_script
from common.versions import REPOSITORY, load_version, relative_error

GOLDEN = REPOSITORY / "tests" / "versions" / "huggingface.json"
STEPS = 5
SIZES = "hidden-dim num-layers num-heads num-kv-heads intermediate-dim vocab-size seq-len batch-size".split()
CASES = {  # SIZES; head sizes 16, 32, 64 and 128, which all four versions take
    "one key/value head": (48, 2, 3, 1, 71, 51, 19, 2),
    "as many as query heads": (64, 1, 2, 2, 33, 101, 7, 2),
    "one token": (64, 1, 1, 1, 50, 37, 1, 5),
    "head size 128": (256, 1, 2, 1, 35, 77, 13, 1),
    "long": (64, 1, 4, 2, 9, 1003, 100, 1),
}
AMP_CASES = {  # SIZES; several key/value heads, each read by several query heads
    "two queries a key": (64, 2, 4, 2, 96, 101, 24, 2),
    "three queries a key": (192, 1, 6, 2, 77, 51, 33, 2),
    "four queries a key": (128, 2, 8, 2, 200, 203, 40, 1),
}
AMP_DTYPES = ("bfloat16", "float16")
AMP_SEEDS = range(8)


def options(case):
    """Return the command line of a case."""
    sizes = [f"--{name} {size}" for name, size in zip(SIZES, (CASES | AMP_CASES)[case], strict=True)]
    return f"{' '.join(sizes)} --learning-rate 1e-2 --seed 5 --no-graph".split()


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


def choose_plain_library(config):
    """Set the options that only the peer has to their defaults: Hugging Face's model as it is."""
    for name, value in vars(peer_script().parse_options(["--device", "cpu"])).items():
        if not hasattr(config, name):
            setattr(config, name, value)


def outcome(case, dtype=torch.float32):
    """Return logits and gradients of the first batch, and losses and weights of five AdamW steps."""
    script = load_version(1)
    config = script.parse_options([*options(case), "--device", "cpu"])
    choose_plain_library(config)
    model = LibraryLlama(config).to(dtype)
    data = script.load_data(config)
    losses = []
    first = {}
    model.llama.set_attn_implementation("eager")
    initial = script.Trainer(config).initial["tensors"]
    for name, p in model.named_parameters():
        p.data.copy_(initial.pop(name))
    assert not initial, f"not in the library's model: {list(initial)}"
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    for step in range(STEPS):
        tokens, labels = script.batch(data, step, config)
        optimizer.zero_grad()
        logits = model.llama(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        first = first or {"logits": logits.detach(), "gradients": gradients}
        optimizer.step()
    return first | {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def draw(name, shape, seed):
    """Return a weight with which every part of the model shows in the result: scores near one, norms that are not."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed))
    return 1 + 0.2 * drawn if len(shape) == 1 else drawn / shape[1] ** 0.5


def mixed_precision(case, dtype, seed):
    """Return logits, loss and gradients of the first batch under autocast to a dtype; in float64 for "float64"."""
    script = load_version(1)
    config = script.parse_options([*options(case), "--device", "cpu"])
    choose_plain_library(config)
    model = LibraryLlama(config)
    half = dtype != "float64"
    model.llama.set_attn_implementation("eager")
    for name, p in model.named_parameters():
        p.data = draw(name, p.shape, seed).to(p.dtype if half else torch.float64)
    tokens, labels = script.batch(script.load_data(config), seed, config)
    with torch.autocast("cpu", getattr(torch, dtype) if half else None, enabled=half):
        logits = model.llama(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), labels.flatten())
    scale = 2.0**10 if dtype == "float16" else 1.0  # float16 loses small gradients
    (loss * scale).backward()
    gradients = {name: p.grad / scale for name, p in model.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def mixed_precision_errors(case, dtype):
    """Return the library's largest relative error over some seeds, of logits, loss and each gradient."""
    largest = {}
    for seed in AMP_SEEDS:
        with float64_throughout():
            exact = mixed_precision(case, "float64", seed)
        for name, tensor in mixed_precision(case, dtype, seed).items():
            largest[name] = max(largest.get(name, 0.0), relative_error(tensor, exact[name]))
    return {name: float(f"{error:.3g}") for name, error in largest.items()}


def fingerprint(tensor):
    """Return the norm of a tensor and its projection on a fixed vector of norm one, which any reordering changes."""
    flat = tensor.detach().double().cpu().flatten()
    pattern = torch.cos(torch.arange(len(flat), dtype=torch.float64) ** 2)
    return [float(f"{number:.9g}") for number in (flat.norm().item(), (flat @ pattern / pattern.norm()).item())]


def fingerprints(found):
    """Return the fingerprint of the logits and of every gradient."""
    return {name: fingerprint(tensor) for name, tensor in {"logits": found["logits"], **found["gradients"]}.items()}


def golden():
    content = {"transformers": importlib.metadata.version("transformers"), "torch": torch.__version__, "cases": {}}
    content["mixed precision"] = {}
    for case in AMP_CASES:
        progress(f"{case}, mixed precision: {', '.join(AMP_DTYPES)}")
        content["mixed precision"][case] = {dtype: mixed_precision_errors(case, dtype) for dtype in AMP_DTYPES}
    for case in CASES:
        progress(f"{case}, float32")
        found = outcome(case)
        content["cases"][case] = {"options": " ".join(options(case)), "losses": found["losses"]}
        content["cases"][case]["fingerprints"] = fingerprints(found)
    return content


if __name__ == "__main__":
    print(re.sub(r"\[[^][]+\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(golden(), indent=1)))
