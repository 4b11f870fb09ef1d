"""Count what a training script runs: operators, Triton launches, bytes and saved activations of each part of a step."""

import contextlib
import inspect
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.command_line import PRECISIONS
from common.versions import load_version

# Each size differs from the others; 3 layers tell what comes once from what comes in each layer.
TOY = (
    "--hidden-dim 64 --num-layers 3 --num-heads 4 --num-kv-heads 1 --intermediate-dim 40 --vocab-size 30 --seq-len 20 "
    "--batch-size 2 --device cpu --no-graph"
).split()
REGIONS = {
    "qkv projection": "QKV projection", "rope": "RoPE", "attention": "attention", "feed-forward": "SwiGLU",
    "output projection": "output projection", "rms norm": "norms and residual", "output head": "output head",
    "loss": "cross-entropy", "embedding": "embedding",
}  # fmt: skip
MODULES = {
    "embed_tokens": "embedding", "gate_proj": "gate and up", "up_proj": "gate and up", "gate_up_proj": "gate and up",
    "down_proj": "down projection",
}  # fmt: skip
NO_LAUNCH = "empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh".split()
ALLOCATE = "ones ones_like zeros zeros_like new_zeros zero_ fill_".split()  # write without reading
MOVE = [*ALLOCATE, *"_to_copy copy_ clone cat embedding triu scatter_ repeat".split()]
# Matmuls over the causal half of the scores in one launch.
ATTENTION = {
    "attention_forward_kernel": 2, "attention_backward_dq_kernel": 3, "attention_backward_dkdv_kernel": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 2, "_scaled_dot_product_flash_attention_for_cpu_backward": 5,
}  # fmt: skip


def toy_config(version, precision, *switches):
    """Return the options of a toy model; the interpreter's refusal of bfloat16 does not matter to kernels not run."""
    replaced = precision == "bfloat16" and version == 3
    config = load_version(version).parse_options([*TOY, *PRECISIONS["float16" if replaced else precision], *switches])
    config.amp_dtype = "bfloat16" if replaced else config.amp_dtype
    return config


def tensors_in(arguments):
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def size_of(tensors):
    """Return the bytes of tensors; the elements of an expanded dimension exist once."""
    sizes = (zip(t.shape, t.stride(), strict=True) for t in tensors)
    counts = (torch.Size(size for size, stride in dims if stride).numel() for dims in sizes)
    return sum(n * t.element_size() for n, t in zip(counts, tensors, strict=True))


def operator_bytes(function, args, kwargs, results):
    """Return the bytes of every operand read and of every result or operand written."""
    name = function.overloadpacket.__name__
    if name == "embedding":  # of the table only the rows of the tokens
        return size_of([args[1], *results, *results])
    if name == "scatter_":  # as many elements as there are indices
        return size_of([args[2]]) + args[2].numel() * args[0].element_size()
    overwritten = 1 if name == "copy_" or (name == "addmm" and kwargs.get("beta") == 0) else 0
    read_by_name = {key: value for key, value in (kwargs or {}).items() if key != "out"}
    reads = [] if name in ALLOCATE else tensors_in((args[overwritten:], read_by_name))
    written = []
    for declared, value in zip(function._schema.arguments, args, strict=False):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        if name == "_fused_adamw_" and declared.name == "grads":  # written only where a gradient scale is given
            continue
        written += tensors_in(value)
    return size_of(reads) + size_of(written or results)


class Collector(TorchDispatchMode):
    """Add up what runs, {(part, phase, quantity): number}; regions, modules and autograd nodes tell the part."""

    def __init__(self, config):
        super().__init__()
        self.counts, self.stack, self.ranges = Counter(), [], []
        self.phase, self.last, self.config = "forward", "cross-entropy", config

    @contextlib.contextmanager
    def region(self, name):
        """Replace a script's annotate."""
        if name not in REGIONS:
            yield
            return
        self.enter(REGIONS[name])
        yield
        self.leave()

    def enter(self, part):
        self.stack.append((part, torch.autograd._get_sequence_nr()))

    def leave(self):
        part, start = self.stack.pop()
        self.ranges.append((start, torch.autograd._get_sequence_nr(), part))

    def part(self):
        if self.phase == "optimizer":
            return "AdamW"
        if self.phase == "forward":  # the residual adds stand between the regions
            return self.stack[-1][0] if self.stack else "norms and residual"
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        around = [(end - start, part) for start, end, part in self.ranges if start <= number < end]
        if around:
            self.last = min(around)[1]
        elif node is not None and "AccumulateGrad" not in node.name():  # sums of gradients belong to what ran before
            self.last = "norms and residual"
        return self.last

    def add(self, name, **quantities):
        part = self.part()
        if part == "cross-entropy" and name in ("mm", "addmm", "mul"):  # of the fused loss
            part = "output head"
        for quantity, number in {"launches": 1, **quantities}.items():
            self.counts[part, "forward" if self.phase == "forward" else "backward", quantity] += number

    def attention_flops(self, name):
        c = self.config
        return ATTENTION.get(name, 0) * c.batch_size * c.seq_len**2 * c.hidden_dim

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        name, outputs = function.overloadpacket.__name__, tensors_in(results)
        tensors = [t for t in (*tensors_in((args, kwargs)), *outputs) if t.numel()]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        # foreach keeps the step counters of version 1 on the host
        on_host = self.phase == "optimizer" and self.foreach and all(t.ndim == 0 for t in tensors)
        if view or name in NO_LAUNCH or on_host or not tensors:
            return results
        quantities = {"bytes": operator_bytes(function, args, kwargs, outputs), "flops": self.attention_flops(name)}
        if name in ("mm", "bmm", "addmm"):
            quantities["flops"] = 2 * outputs[0].numel() * args[-1].shape[-2]
        elif name not in MOVE and name not in ATTENTION:
            largest = args[0] if isinstance(args[0], (list, tuple)) else [max(tensors, key=torch.Tensor.numel)]
            quantities["operations"] = sum(t.numel() for t in largest)
        self.add(name, **quantities)
        return results


class NotedKernel:
    """Stand for a Triton kernel: count its launch and the tensors that it was handed, and do not run it."""

    def __init__(self, script, collector, name, kernel):
        self.script, self.collector, self.name = script, collector, name
        self.parameters = list(inspect.signature(kernel.fn).parameters)

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        given = dict(zip(self.parameters, args, strict=False)) | kwargs
        self.collector.add(self.name, bytes=self.moved(given), flops=self.collector.attention_flops(self.name))

    def moved(self, given):
        if self.name == "adamw_kernel":  # copy, low bits or master, both moments, gradient; all but the last written
            wide = {"fp32": 28, "bf16": 26, "fp16": 28}[given["dtype"].name]
            elements = given["table_ptr"][:, self.script.COUNT.value].tolist()
            return wide * sum(elements[row] for row in set(given["chunk_ptr"][:, 0].tolist()))
        tensors = {t.data_ptr(): t for t in given.values() if isinstance(t, torch.Tensor)}
        moved = size_of(list(tensors.values()))
        if "dx_ptr" in given and given["dx_ptr"] is given.get("x_ptr"):  # of the fused loss: read and written
            moved += size_of([given["dx_ptr"]])
        if "dqkv_ptr" in given:  # one backward kernel writes the gradient of H heads, the other that of 2K
            dqkv, H, K = given["dqkv_ptr"], given["H"], given["K"]
            moved -= size_of([dqkv]) * (2 * K if "_dq_" in self.name else H) // (H + 2 * K)
        return moved


def saving(model, collector):
    """Return hooks that count what is saved for backward, each storage once, without the model's own tensors."""
    seen, alive = {t.untyped_storage().data_ptr() for t in (*model.parameters(), model.cos, model.sin)}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            alive.append(storage)  # freed, it could give its address to another
            collector.add("saved", launches=0, saved=storage.nbytes())
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def collect(version, precision, monkeypatch, *switches):
    """Return the counts of one step of a toy model."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # on a machine with a GPU version 3 would refuse the CPU
    script, config = load_version(version), toy_config(version, precision, *switches)
    collector = Collector(config)
    monkeypatch.setattr(script, "annotate", collector.region)
    for name, value in list(vars(script).items()):
        if name.endswith("_kernel") and hasattr(value, "fn"):
            monkeypatch.setattr(script, name, NotedKernel(script, collector, name, value))
        if version == 3 and isinstance(value, script.AttentionKernel):
            noted = NotedKernel(script, collector, value.kernel.fn.__name__, value.kernel)
            monkeypatch.setattr(script, name, value._replace(kernel=noted))
    trainer = script.Trainer(config)
    collector.foreach = version == 1
    if collector.foreach:
        trainer.optimizer.param_groups[0]["foreach"] = True  # the default on a GPU
    for name, module in trainer.model.named_modules():
        part = MODULES.get(name.rsplit(".", 1)[-1])
        if part:
            module.register_forward_pre_hook(lambda *_, part=part: collector.enter(part))
            module.register_forward_hook(lambda *_: collector.leave())
    trainer.step()  # the optimizer makes its state
    trainer.optimizer.zero_grad(set_to_none=True)
    tokens, labels = trainer.tokens.clone(), trainer.labels.clone()  # they share a storage
    collector.__init__(config)
    with collector:
        with saving(trainer.model, collector):
            loss = script.compute_loss(trainer.model, tokens, labels, config)
        collector.phase = "backward"
        loss.backward()
        collector.phase = "optimizer"
        trainer.optimizer.step()
    return collector.counts
