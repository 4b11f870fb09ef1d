"""As much of Hugging Face's transformers as scripts/common/measuring/peers.py asks for, computed by version 1."""

from types import SimpleNamespace

from torch import nn

from common.versions import load_version

LlamaConfig = SimpleNamespace


class AttentionInterface:
    functions = {}

    @classmethod
    def register(cls, name, function):
        cls.functions[name] = function


def norm(c):
    return nn.RMSNorm(c.hidden_size, c.rms_norm_eps)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        C, F, self.D = c.hidden_size, c.intermediate_size, c.hidden_size // c.num_attention_heads
        self.attend = AttentionInterface.functions[c.attn_implementation]
        kv = c.num_key_value_heads * self.D
        names = {"q_proj": C, "k_proj": kv, "v_proj": kv, "o_proj": C}
        self.self_attn = nn.ModuleDict({name: nn.Linear(C, size, bias=False) for name, size in names.items()})
        sizes = {"gate_proj": (C, F), "up_proj": (C, F), "down_proj": (F, C)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.input_layernorm, self.post_attention_layernorm = norm(c), norm(c)

    def forward(self, x, tables):
        v1, a, m, h = load_version(1), self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (a[name](h).unflatten(-1, (-1, self.D)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k, v = (y.transpose(1, 2) for y in (v1.apply_rope(q, *tables), v1.apply_rope(k, *tables), v))
        x = x + a["o_proj"](self.attend(self, q, k, v, None, scaling=self.D**-0.5)[0].flatten(-2))
        h = self.post_attention_layernorm(x)
        return x + m["down_proj"](v1.swiglu(m["gate_proj"](h), m["up_proj"](h)))


class LlamaModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.D = c.hidden_size // c.num_attention_heads
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = norm(c)

    def forward(self, input_ids, use_cache):
        tables = load_version(1).rope_tables(input_ids.shape[1], self.D, 10000.0, input_ids.device)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, tables)
        return SimpleNamespace(last_hidden_state=self.norm(x))


class LlamaForCausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = LlamaModel(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, labels, shift_labels, use_cache):
        logits = self.lm_head(self.model(input_ids, use_cache).last_hidden_state).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        return SimpleNamespace(loss=loss)
