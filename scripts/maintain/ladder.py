"""Generate the measured tables of the pages, and the times that they quote, from one recorded run.

    python scripts/maintain/ladder.py                # print all tables of the newest recorded run
    python scripts/maintain/ladder.py --write        # put them between the markers of all pages
    python scripts/maintain/ladder.py --check        # do the pages say what was recorded, and did the commit run it?

A recorded run is a folder that maintain/record.sh wrote. Each table comes from one of its parts: headline, v1 to v4
and v1_v3 from the headline; graph, kernels, ablation2, ablation3, memory, stages and ddp from the part of that name.
A page has a table where it has its markers (scripts/common/pages.py); a table whose part the run lacks keeps its text.

Exit status: 0; 1 if --check finds a difference; 2 for a bad option or a file that cannot be read.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.command_line import Parser
from common.pages import all_pages, fill, fill_quotes, quoted_rows, write_or_check
from common.provenance import faults_of_commit, machine_line
from common.records import MODELS, PRECISIONS, Record, configurations, newest_record, table_of
from common.tables import known, markdown_table, rounded
from common.versions import REPOSITORY, SCRIPTS

SCRIPT_OF = {f"v{version}": path for version, path in SCRIPTS.items()}
SCRIPT_OF |= dict.fromkeys(("hf", "liger"), REPOSITORY / "scripts" / "common" / "peers.py")


def origin(record, recorded):
    """Return one line that says where a part was measured."""
    return f"{machine_line(record)}; `scripts/recorded/{recorded.folder.name}`."


def explained(results):
    """Return what a row's numbers are, in one sentence."""
    repeats = sorted({row["repeats"] for row in results["rows"]})
    count = f"{repeats[0]} to {repeats[-1]}" if repeats[0] < repeats[-1] else str(repeats[0])
    steps = "all steps" if "steps_ms" in results["runs"][0] else "the medians"
    gradients = " Gradient error: the worst of all parameters, relative to V1 in fp32." if results["accuracy"] else ""
    return (
        f"Step time: median and quartiles of {steps} of {count} processes, which took turns with the other rows. "
        f"Times V1: V1 in fp32 over this row in the same round. Peak memory: the largest.{gradients}"
    )


def suite_table(recorded, part, keep=lambda model: True):
    """Return the rows of a part, one table per preset; None without any."""
    results = recorded.suite(part)
    shown = [row for row in results["rows"] if keep(row["model"])]
    if not shown:
        return None
    metrics = ["throughput", "memory"] + ["accuracy"] * any(row["gradient_error"] is not None for row in shown)
    parts = [origin(results["record"], recorded), explained(results)]
    for title, rows in configurations(shown).items():
        parts += [f"**{title}**", markdown_table(*table_of(rows, metrics), left=3)]
    return "\n\n".join(parts)


def graph_table(recorded):
    """Return the steps launched one operation at a time, and the same ones replayed from a graph."""
    results, pairs, lines = recorded.suite("graph"), {}, []
    for row in results["rows"]:
        name = row["preset"], MODELS.get(row["model"], row["model"]), PRECISIONS[row["precision"]]
        pairs.setdefault(name, {})[row["captured"]] = row["step_ms"]
    for name, step in ((name, step) for name, step in pairs.items() if len(step) == 2):
        eager, graph = step[False], step[True]
        lines.append([*name, rounded(eager, 4), rounded(graph, 4), f"{eager / graph:.2f}"])
    header = ["preset", "", "precision", "eager ms", "graph ms", "eager / graph"]
    return lines and f"{origin(results['record'], recorded)}\n\n{markdown_table(header, lines, left=3)}"


def kernels_table(recorded):
    """Return each of version 3's kernels with the ceiling and the fastest of PyTorch's operators."""
    kernels, lines = recorded.json("kernels", "kernels.json"), []
    for operation in kernels["operations"] if kernels else []:
        timed = {c["name"]: c for c in operation["candidates"] if "us" in c}
        if ours := timed.pop("V3", None):
            cells = [f"{ours['us']['median']:.1f}", f"{ours['rate']:,.0f} {operation['unit']}", f"{ours['share']:.0%}"]
            best = min(timed, key=lambda name: timed[name]["us"]["median"], default="")
            cells += [best, f"{ours['against_pytorch']:.2f}" if best else ""]
            lines.append([f"{operation['operation']}, {operation['size']}", *cells])
    if not lines:
        return None
    rates = ", ".join(f"{PRECISIONS[p]} {rate:,.0f}" for p, rate in kernels["ceilings"]["product"].items())
    ceilings = f"copy {kernels['ceilings']['copy']:,.0f} GB/s (read and written), 8192³ matmuls {rates} TFLOP/s"
    header = ["V3's kernel", "us", "rate", "of the ceiling", "fastest of PyTorch's", "its time / V3's"]
    told = f"Ceilings: {ceilings}. Kernels in {PRECISIONS[kernels['dtype']]}, alone:"
    return f"{origin(kernels['record'], recorded)} {told}\n\n{markdown_table(header, lines)}"


def ablation_table(recorded, part):
    """Return what each switch is worth when it is added alone, and when it is the last one added."""
    study = recorded.json(part, "ablation.json")
    if not study:
        return None
    steps = {frozenset(row["on"]): row["step_ms"] for row in study["combinations"]}
    none, every = (steps.get(frozenset(on)) for on in ((), (row["switch"] for row in study["switches"])))
    header = ["switch", "alone", "taken away from all", "peak MiB", "kernels per step"]
    patterns = {"switch": "", "alone": ".2f", "last": ".2f", "memory_mb": "+,.0f", "kernels": "+,.0f"}
    lines = [[known(row[key], pattern) for key, pattern in patterns.items()] for row in study["switches"]]
    rounds = min(len(row["steps_ms"]) for row in study["combinations"] if row["steps_ms"])
    noise = "One round: a difference of some percent may be noise." if rounds == 1 else f"Medians of {rounds} rounds."
    told = f"{noise} Without any switch {rounded(none, 4)} ms, with all {rounded(every, 4)} ms per step. Speed-ups:"
    return f"{origin(study['record'], recorded)} {told}\n\n{markdown_table(header, lines)}"


def memory_table(recorded):
    """Return the peak memory of each version over the length of the sequences."""
    found = recorded.json("memory", "memory.json")
    if not found:
        return None
    header = ["peak MiB", *(f"{length:,} tokens" for length in found["lengths"])]
    lines = [[f"V{row['version']}", *(known(peak, ",.0f") for peak in row["peaks_mb"])] for row in found["rows"]]
    return f"{origin(found['record'], recorded)}\n\n{markdown_table(header, lines)}"


def stages_table(recorded):
    """Return what the debugging stages printed when they were compared."""
    path = recorded.folder / "stages" / "comparison.txt"
    return f"```text\n{path.read_text().strip()}\n```" if path.exists() else None


def tables_of(recorded):
    """Return {name of a table: its text} of all tables that the run has the measurements for."""
    made = {"headline": suite_table(recorded, "headline", lambda model: model not in ("hf", "v1+nodet"))}
    for name in (f"v{version}" for version in SCRIPTS):
        made[name] = suite_table(recorded, "headline", lambda model, name=name: model.split("+")[0] == name)
    made["v1_v3"] = suite_table(recorded, "headline", lambda model: model in ("v1", "v3"))
    made |= {"graph": graph_table(recorded), "kernels": kernels_table(recorded), "memory": memory_table(recorded)}
    made |= {part: ablation_table(recorded, part) for part in ("ablation2", "ablation3")}
    made |= {"ddp": suite_table(recorded, "ddp"), "stages": stages_table(recorded)}
    return {name: text for name, text in made.items() if text}


def filled_pages(recorded, paths):
    """Return {page: its text as it should be}."""
    tables = tables_of(recorded)
    return {path: fill_quotes(fill(path.read_text(encoding="utf-8"), tables), recorded.row) for path in paths}


def check(recorded, paths):
    """Return 1, with the differences, if a page disagrees or another text of a script ran than the commit has."""
    status = write_or_check(filled_pages(recorded, paths), True, "python scripts/maintain/ladder.py --write")
    results = recorded.suite()
    ran = {(SCRIPT_OF[run["case"].model.split("+")[0]], run["script_sha256"]) for run in results["runs"]}
    quoted = [(path, row) for path in paths for row in quoted_rows(path.read_text(encoding="utf-8"))]
    missing = [f"{path.name} quotes {row}, which was not recorded" for path, row in quoted if not recorded.row(*row)]
    for fault in [*faults_of_commit(results["record"]["commit"], ran), *missing]:
        print(f"{recorded.folder.name}: {fault}", file=sys.stderr)
        status = 1
    print(f"{len(paths)} pages compared with {recorded.folder.name}")
    return status


def main(argv=None):
    parser = Parser("ladder.py", __doc__, with_json=False)
    parser.add_argument("--recorded", type=pathlib.Path, metavar="FOLDER", help="which recorded run (the newest)")
    parser.add_argument("--page", type=pathlib.Path, action="append", metavar="FILE", help="these pages alone (all)")
    parser.add_argument("--write", action="store_true", help="put tables and quoted times into the pages")
    parser.add_argument("--check", action="store_true", help="compare the pages with them")
    return parser.run(work, argv)


def work(arguments):
    recorded = Record(arguments.recorded) if arguments.recorded else newest_record()
    paths = arguments.page or all_pages()
    if arguments.write:
        write_or_check(filled_pages(recorded, paths), False, "")
    if arguments.check:
        return check(recorded, paths)
    if not arguments.write:
        print("\n\n".join(f"## {name}\n\n{text}" for name, text in tables_of(recorded).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
