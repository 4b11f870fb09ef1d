"""What one would take instead of the four versions: Hugging Face's Llama as it is, compiled, in a graph, or with Liger.

    python scripts/common/peers.py --library transformers --preset small --use-amp
    python scripts/common/peers.py --library transformers --preset small --use-amp --enable-torch-compile --graph
    python scripts/common/peers.py --library liger --preset small --use-amp

This is version 1's script with a library's model, loss and optimizer in place of its own. Weights, batches, options,
the timed step, the printed summary and the metrics file are version 1's, so that the figures can stand beside ours.
Exit status: as version 1's; 2 also where the library is not installed.
"""

import importlib
import importlib.util
import pathlib
import sys

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.versions import SCRIPTS

PACKAGES = {"transformers": ("transformers",), "liger": ("transformers", "liger_kernel.transformers")}

# The library's names of modules -> the canonical ones; what is not listed is called the same.
CANONICAL = {
    "self_attn": "attention",
    "mlp": "feed_forward",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}


class LibraryLlama(nn.Module):
    """LlamaForCausalLM of these sizes: tokens and labels [B, T] to the loss. Its parameters carry canonical names."""

    def __init__(self, config, options):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        if options.library == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_dim,
                intermediate_size=config.intermediate_dim,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                max_position_embeddings=options.seq_len,
                rms_norm_eps=config.norm_eps,
                tie_word_embeddings=True,
                attn_implementation="sdpa",
                bos_token_id=None,
                eos_token_id=None,
            )
        )
        if options.enable_torch_compile:
            self.compile()

    def named_parameters(self, *args, **kwargs):
        for name, parameter in super().named_parameters(*args, **kwargs):
            parts = name.removeprefix("llama.model.").split(".")
            yield ".".join(CANONICAL.get(part, part) for part in parts), parameter

    def forward(self, tokens, labels):
        # Labels are the next tokens already: shift_labels tells the library's loss not to shift them once more.
        return self.llama(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def add_version_options(parser):
    group = parser.add_argument_group("library")
    group.add_argument("--library", choices=PACKAGES, default="transformers", help="whose model (%(default)s)")
    group.add_argument("--enable-torch-compile", action="store_true", help="compile model and loss")


def check_version_options(options):
    if options.profile_attention_only:
        raise ValueError("--profile-attention-only is for the four versions: leave it out here")
    if options.library == "liger" and torch.device(options.device).type == "cpu":
        raise ValueError("--library liger needs a GPU: its kernels have nothing to run on here")
    for package in PACKAGES[options.library]:
        name = package.split(".")[0].replace("_", "-")
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ValueError(f"--library {options.library} needs the package {name} ({error}): install it") from None


def describe_parts(options):
    packages = [importlib.import_module(package.split(".")[0]) for package in PACKAGES[options.library]]
    names = [f"{package.__name__} {getattr(package, '__version__', '')}".strip() for package in packages]
    compiled = ", torch.compile" * options.enable_torch_compile
    return f"{' with '.join(names)}: SDPA attention, fused AdamW{compiled}"


def make_optimizer(model, options):
    return torch.optim.AdamW(model.parameters(), lr=options.learning_rate, capturable=options.graph, fused=True)


def compute_loss(model, tokens, labels, options):
    """Mean cross-entropy of predicting labels [B, T] from tokens [B, T], computed by the library."""
    with torch.autocast(tokens.device.type, getattr(torch, options.amp_dtype), enabled=options.use_amp):
        return model(tokens, labels)


def peer_script():
    """A module of version 1's script, for itself alone, whose model, loss, optimizer and own options are ours."""
    spec = importlib.util.spec_from_file_location("tiny_llama_peer", SCRIPTS[1])
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    class Parser(script.Parser):
        def __init__(self, **texts):
            example = "example: python scripts/common/peers.py --preset small --use-amp --enable-torch-compile --graph"
            super().__init__(**texts | {"prog": "peers.py", "description": __doc__.split("\n")[0], "epilog": example})

    script.__file__ = __file__  # the commit and the hash that the metrics name are this file's
    script.VERSION = "peer"
    script.DETERMINISTIC_BY_DEFAULT = False
    script.Parser = Parser
    script.TinyLlama = LibraryLlama
    for part in (add_version_options, check_version_options, describe_parts, make_optimizer, compute_loss):
        setattr(script, part.__name__, part)
    return script


if __name__ == "__main__":
    sys.exit(peer_script().main())
