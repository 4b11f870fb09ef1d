"""The ladder: what each rung runs, the one idea in which it differs from its base, and what was measured of it.

A new rung is one row of LADDER: the measuring tool, tables, pictures and tests take everything from that row, and show
"..." where a record lacks the rung.

PEERS and VOCABULARY are measured the same way, into the files peers.json and vocabulary.json. A rung that is tuned runs
with the options of the fastest row of PEERS in its precision, at its preset: what was tried stands beside its options.

A file ladder.json holds "columns": each one preset, eager or in a graph, measured on one machine. A column has its
record (machine, commit, command), its rungs (options, status, loss, memory) and its rounds: the times of ten steps
of every rung, or of several times ten. "again" names the rung of the A/A pair.
"""

import json
import statistics
from typing import NamedTuple

from common.files import errors_of, read_object
from common.ratios import ROUNDS_NEEDED, check_times, furthest, gain, noise_line, noisiest, noisiest_line, ratios
from common.tables import known, text_table, write_whole
from common.versions import REPOSITORY, SCRIPTS
from maintain.rounds import AGAIN

PEER_SCRIPT = REPOSITORY / "scripts" / "common" / "measuring" / "peers.py"

AMP = ["--use-amp"]
# Version 2 with nothing of its own; a rung that builds on it takes single switches away.
QKV, GATE_UP, ADAMW = "--disable-qkv-fusion", "--disable-swiglu-fusion", "--disable-fused-optimizer"


class Rung(NamedTuple):
    """Name a training script with options, and say what the pages show of it.

    version: 1 to 4, or "peer" for common/measuring/peers.py. The first five fields are kept in a record.
    """

    name: str
    idea: str
    version: int | str
    options: list
    base: str | None = None  # the rung that it builds on
    shown: str = ""  # on pictures
    saves: str | None = None  # over its base: a key of pictures.SAVES
    peers: tuple = ()  # the rungs with a library's model in the same precision
    tuned: bool = False  # the fastest row of PEERS in its precision; its own options are added
    road: bool = False  # a bundle of ideas; the roads part after the rungs of single ideas
    noisiest: str | None = None  # "eager" or "graph": where it runs under two names, as the A/A pair
    first_picture: str = ""  # its words on README's picture, where few rungs stand
    predicted: tuple = ()  # of versions 1 to 3: title and other rung of a ratio in maintain/expected.py

    def recorded(self):
        """Return the fields that a record keeps."""
        return {key: getattr(self, key) for key in RECORDED}

    @property
    def precision(self):
        if "--fp8" in self.options:
            return "fp8"
        return "bfloat16" if "--use-amp" in self.options else "float32"


RECORDED = ("name", "idea", "version", "options", "base")


COMPILED = ["--enable-torch-compile"]
LADDER = [
    Rung(
        "a",
        "plain PyTorch, float32, deterministic (version 1 as it runs)",
        1,
        [],
        shown="float32",
        first_picture="V1  plain PyTorch, float32",
    ),
    Rung(
        "b",
        "bfloat16 matmuls",
        1,
        AMP,
        "a",
        shown="bf16 matmuls",
        saves="bits",
        first_picture="V1  plain PyTorch, bfloat16",
        predicted=("V1 fp32 / bf16", "a"),
    ),
    Rung("c", "not deterministic", 1, [*AMP, "--no-deterministic"], "b", shown="not deterministic", noisiest="eager"),
    Rung(
        "d",
        "attention without a score matrix",
        2,
        [*AMP, QKV, GATE_UP, ADAMW],
        "c",
        shown="no score matrix",
        saves="bytes",
    ),
    Rung(
        "e", "one GEMM for q, k, v; one for gate and up", 2, [*AMP, ADAMW], "d", shown="packed GEMMs", saves="launches"
    ),
    Rung(
        "f",
        "AdamW in one kernel per list of tensors (a flag)",
        2,
        AMP,
        "e",
        shown="AdamW, one kernel",
        saves="launches and bytes",
        predicted=("bf16 V1 / V2", "b"),
    ),
    Rung(
        "g",
        "the compiler: `torch.compile` (version 2 compiled)",
        2,
        [*AMP, *COMPILED],
        "f",
        shown="compiler",
        saves="launches and bytes",
        road=True,
        noisiest="graph",
        first_picture="V2  fused, torch.compile",
    ),
    Rung(
        "h",
        "kernels: Triton, and 16-bit weights with float32 masters (version 3)",
        3,
        AMP,
        "f",
        shown="Triton kernels",
        saves="launches and bytes",
        peers=("peer", "library"),
        road=True,
        first_picture="V3  our Triton kernels",
        predicted=("bf16 V1 / V3", "b"),
    ),
    Rung(
        "i",
        "8-bit matmuls (version 3, `--fp8`)",
        3,
        [*AMP, "--fp8"],
        "h",
        shown="fp8",
        saves="bits",
        peers=("peer fp8", "library fp8"),
    ),
    Rung(
        "j",
        "the kernels inside the compiler's graph (version 3, `--enable-torch-compile`)",
        3,
        [*AMP, *COMPILED],
        "h",
        shown="kernels, compiled",
        saves="launches",
    ),
    Rung(
        "k",
        "libraries: PyTorch's fused norm, 16-bit weights, `torch.compile` (version 4)",
        4,
        AMP,
        "f",
        shown="libraries",
        saves="launches and bytes",
        road=True,
        first_picture="V4  PyTorch's fused parts",
    ),
    Rung(
        "peer",
        "Hugging Face's LLaMA as its users run it, bfloat16",
        "peer",
        [*AMP, *COMPILED],
        shown="HF, bf16",
        first_picture="Hugging Face, compiled",
    ),
    Rung(
        "peer fp8",
        "Hugging Face's LLaMA as its users run it, fp8",
        "peer",
        [*AMP, *COMPILED, "--fp8"],
        shown="HF, fp8",
    ),
    Rung(
        "library",
        "the strongest stack that we could build around Hugging Face's model, bfloat16",
        "peer",
        AMP,
        shown="stack, bf16",
        tuned=True,
        first_picture="Hugging Face, tuned by us",
    ),
    Rung(
        "library fp8",
        "the strongest stack that we could build around Hugging Face's model, fp8",
        "peer",
        [*AMP, "--fp8"],
        shown="stack, fp8",
        tuned=True,
    ),
]

MASTERS = [*COMPILED, "--master-weights"]
UPDATED = [*MASTERS, "--compile-optimizer"]
PACKED = [*UPDATED, "--packed"]
CUDNN = ["--attention-backend", "cudnn"]
FP8 = [*AMP, *COMPILED, "--fp8", "--fp8-recipe"]
# How a good engineer might run the library. A rung that is tuned takes the fastest of its precision.
PEERS = [
    Rung("compiled", "as its users run it", "peer", [*AMP, *COMPILED]),
    Rung("liger", "Liger's RMSNorm, RoPE and SwiGLU, not compiled", "peer", [*AMP, "--library", "liger"]),
    Rung("masters", "masters", "peer", [*AMP, *MASTERS]),
    Rung("updated", "masters, compiled AdamW", "peer", [*AMP, *UPDATED]),
    Rung("packed", "masters, compiled AdamW, packed", "peer", [*AMP, *PACKED]),
    Rung("cudnn", "masters, compiled AdamW, packed, cuDNN", "peer", [*AMP, *PACKED, *CUDNN]),
    Rung(
        "layers",
        "masters, compiled AdamW, packed, cuDNN, by layers",
        "peer",
        [*AMP, *PACKED, *CUDNN, "--compile-blocks"],
    ),
    Rung("unpacked", "masters, compiled AdamW, cuDNN", "peer", [*AMP, *UPDATED, *CUDNN]),
    Rung(
        "unpacked layers",
        "masters, compiled AdamW, cuDNN, by layers",
        "peer",
        [*AMP, *UPDATED, *CUDNN, "--compile-blocks"],
    ),
    Rung("fp8 tensorwise", "fp8, tensorwise", "peer", [*FP8, "tensorwise"]),
    Rung("fp8 rowwise", "fp8, rowwise", "peer", [*FP8, "rowwise"]),
    Rung("fp8 rowwise_with_gw_hp", "fp8, rowwise_with_gw_hp", "peer", [*FP8, "rowwise_with_gw_hp"]),
    Rung(
        "fp8 masters",
        "fp8, tensorwise, masters, compiled AdamW, cuDNN",
        "peer",
        [*AMP, *UPDATED, *CUDNN, "--fp8"],
    ),
    Rung(
        "fp8 packed",
        "fp8, tensorwise, masters, compiled AdamW, packed, cuDNN",
        "peer",
        [*AMP, *PACKED, *CUDNN, "--fp8"],
    ),
]
# Its compiler takes minutes: it is measured only where it is named.
SLOW_PEER = Rung(
    "autotuned",
    "masters, compiled AdamW, packed, max-autotune",
    "peer",
    [*AMP, *PACKED, "--compile-mode", "max-autotune-no-cudagraphs"],
)

# The same model over long sequences: options of the training scripts beside --preset medium.
LONG = "--seq-len 4096 --batch-size 2"
LONG_SHOWN = "T = 4,096"

# Output head and loss over the number of vocabulary entries: who writes the whole logits, and who does not.
VOCABULARY_OPTION = "--vocab-size"
VOCABULARIES = (1000, 32000, 128256)
LARGE_CHUNKS = ["--liger-loss", "--liger-chunk", "2048"]  # as many rows as version 3's chunks
CHUNKS_OVER = ("hf liger", "stack", "stack liger")  # what version 3 in chunks is compared with
VOCABULARY = [
    Rung("v2", "V2, compiled", 2, [*AMP, *COMPILED], noisiest="graph"),
    Rung("v3 whole", "V3, whole logits", 3, [*AMP, "--disable-fused-loss"]),
    Rung("v3", "V3, in chunks", 3, [*AMP, "--enable-fused-loss"], "v3 whole", peers=CHUNKS_OVER),
    Rung("v4", "V4", 4, AMP),
    Rung("hf", "Hugging Face", "peer", [*AMP, *COMPILED]),
    Rung("hf liger", "Hugging Face with Liger's fused loss", "peer", [*AMP, *COMPILED, "--liger-loss"], "hf"),
    Rung("stack", "strongest stack", "peer", AMP, tuned=True),
    Rung("stack liger", "strongest stack with Liger's, chunks of 2,048", "peer", [*AMP, *LARGE_CHUNKS], tuned=True),
]


def script_of(rung):
    """Return the path of the script that a rung runs."""
    return SCRIPTS.get(rung.version, PEER_SCRIPT)


def by_name(rungs):
    return {rung.name: rung for rung in rungs}


# ---------------------------------------------------------------- what was measured


def read_columns(path):
    """Return the columns of a file; Failure with one sentence where it is none."""
    with errors_of(path):
        columns = [Column(content) for content in read_object(path, "file of columns")["columns"]]
        for column in columns:
            for found in column.rounds:
                for times in found["steps_ms"].values():
                    check_times(times)
            if column.rounds:
                lines_of(column)  # raises an error where something that it shows is missing or of another kind
        return columns


def write_columns(columns, path):
    """Write the file whole or not at all, with one line for each rung and each round."""
    texts = []
    for column in columns:
        content = dict(column.content)
        lists = {key: ",\n  ".join(map(json.dumps, content.pop(key))) for key in ("rungs", "rounds")}
        parts = [json.dumps(content)[:-1], *(f' "{key}": [\n  {lines}\n ]' for key, lines in lists.items())]
        texts.append(",\n".join(parts) + "}")
    write_whole(path, '{"columns": [\n' + ",\n".join(texts) + "\n]}\n")


class Column:
    """Read one column: the times of its rungs, and their gains within rounds."""

    def __init__(self, content):
        self.content = content
        self.rounds = content["rounds"]
        self.rungs = by_name(Rung(*(rung[key] for key in RECORDED)) for rung in content["rungs"])
        self.told = {rung["name"]: rung for rung in content["rungs"]}  # status, reason, memory, loss, ...

    @property
    def way(self):
        return "with a graph" if self.content["graph"] else "eager"

    @property
    def title(self):
        return f"{self.content['preset']}, {self.way} {self.content['options']}".rstrip()

    def medians(self, *names):
        """Return a list for each name: its median step of every round that measured all of them."""
        rounds = [found["steps_ms"] for found in self.rounds if all(name in found["steps_ms"] for name in names)]
        return [[statistics.median(steps[name]) for steps in rounds] for name in names]

    def step_ms(self, name):
        (times,) = self.medians(name)
        return statistics.median(times) if times else None

    def starts(self, *names):
        return len({found["start"] for found in self.rounds if all(name in found["steps_ms"] for name in names)})

    def turns(self):
        """Count the rounds; what memory had no room for was measured in a second group of the same round."""
        return len({(found["start"], found["turn"]) for found in self.rounds})

    def pair(self):
        """Return the times of the A/A pair, or None where it was not measured."""
        again = self.content["again"]
        pair = self.medians(again, again + AGAIN)
        return pair if pair[0] else None

    def gain(self, name, base):
        """Return the Gain of a rung over another; None where no round has both."""
        before, after = self.medians(base, name)
        if not after:
            return None
        return gain(before, after, self.pair(), self.starts(base, name))

    def over_bases(self):
        """Return (rung, base) of the rungs that were measured with their base."""
        return [(name, rung.base) for name, rung in self.rungs.items() if rung.base in self.rungs]

    def over_peers(self):
        """Return (rung, peer) of the rungs that were measured with the peer of their precision."""
        pairs = [(rung.name, peer) for rung in [*LADDER, *VOCABULARY] for peer in rung.peers]
        return [pair for pair in pairs if self.rungs.keys() >= set(pair)]

    def noisiest(self):
        """Return the rung whose rounds differ most from their median, and by how many percent."""
        medians = {name: self.medians(name)[0] for name in self.rungs}
        return noisiest({name: times for name, times in medians.items() if times})


def tuned(rung, columns, preset, options):
    """Return a Rung that is tuned, with the options of the fastest way to run the peer, and what was tried for it.

    columns: of a file peers.json; the last one of this preset and these options with rows of the rung's precision is
    read, and LookupError raised without one. Where no such row could run, the rung keeps its own options.
    """
    for column in reversed(columns):
        rows = {name: row for name, row in column.rungs.items() if row.precision == rung.precision}
        if rows and (column.content["preset"], column.content["options"]) == (preset, options):
            break
    else:
        raise LookupError
    steps = {name: ms for name in rows if (ms := column.step_ms(name)) and name != SLOW_PEER.name}
    tuning = {"chosen": min(steps, key=steps.get, default=None), "steps_ms": steps}
    tuning["seconds"] = column.content.get("seconds")
    if not steps:
        return rung, tuning
    chosen = rows[tuning["chosen"]].options
    own = [option for option in rung.options if option not in chosen]
    return rung._replace(options=[*chosen, *own]), tuning


def all_columns(recorded, kind, options=""):
    """Return the Columns with enough rounds of the parts of a kind, ladder, peers or vocabulary, the oldest first."""
    found = [column for path in recorded.folder.glob(f"{kind}*/{kind}.json") for column in read_columns(path)]
    found.sort(key=lambda column: column.content["record"]["date"])
    enough = 1 if kind == "peers" else ROUNDS_NEEDED
    return [column for column in found if column.turns() >= enough and column.content["options"] == options]


def columns_of(recorded, kind, options=""):
    """Return {(preset, in a graph): the newest Column}."""
    found = all_columns(recorded, kind, options)
    return {(column.content["preset"], column.content["graph"]): column for column in found}


def columns_over_vocabulary(recorded):
    """Return {vocabulary entries: the newest Column of medium in a graph}."""
    found = {}
    for V in VOCABULARIES:
        for column in all_columns(recorded, "vocabulary", f"{VOCABULARY_OPTION} {V}"):
            if column.content["preset"] == "medium" and column.content["graph"]:
                found[V] = column
    return found


COLUMNS = ["", "idea", "builds on", "ms", "over its base (smallest to largest)", "peak MiB", "loss"]


def cells(column, rung):
    """Return the row of a rung; "not measured" stands for its time where it failed."""
    told = column.told[rung.name]
    step = column.step_ms(rung.name)
    if step is None:
        return [rung.name, rung.idea, rung.base or "", told["status"], "", "", ""]
    found = column.gain(rung.name, rung.base) if rung.base else None
    memory = known(told.get("peak_mib"), ",.0f")
    return [rung.name, rung.idea, rung.base or "", f"{step:.3f}", str(found or ""), memory, f"{told['loss']:.4f}"]


def lines_of(column):
    """Return the lines that the suite prints about a column: table, A/A pair, leads over peers, what failed."""
    rows = [cells(column, rung) for rung in column.rungs.values()]
    count = f"{column.turns()} rounds over {column.starts()} starts"
    lines = [f"{column.title}: {count}", text_table(COLUMNS, rows, left=3)]
    if pair := column.pair():
        lines.append(noise_line(column.content["again"], furthest(ratios(*pair))))
        if column.turns() > 1:
            lines.append(noisiest_line(*column.noisiest()))
    for name, peer in column.over_peers():
        if found := column.gain(name, peer):
            lines.append(f"{name} compared with {peer}: {found}")
    lines += [f"{name}: {told['reason']}" for name, told in column.told.items() if told.get("reason")]
    return lines
