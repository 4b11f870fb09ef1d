"""Same name, same code: what two versions both define at their top level is the same source text in both.

    python scripts/maintain/same_code.py              check the four scripts
    python scripts/maintain/same_code.py --fix        copy each definition from the first version over its copies
    python scripts/maintain/same_code.py --diff 1 3   what version 3 changes: the lesson, and nothing else
    python scripts/maintain/same_code.py FILE FILE    check other files: their definitions, not the two lists below

Compared are functions, classes and assignments, also under a top-level if, try or with, together with the decorators
and comments right above them, and what each import binds. Shared names stand in the same order, so that a diff of two
versions is short. A name in FORKS differs, and only as said there; a name in SHARED is in all four.

Exit status: 0, 1 where something differs, 2 for bad arguments or a file that cannot be read.
"""

import argparse
import ast
import difflib
import itertools
import pathlib
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from common.versions import REPOSITORY, SCRIPTS

# name -> (which versions share a text, "124 3" for 1, 2 and 4 against 3; why they differ)
FORKS = {
    "VERSION": ("1 2 3 4", "the number of the version"),
    "GRAPH_BY_DEFAULT": ("12 34", "a graph pays where kernels are small"),
    "DETERMINISTIC_BY_DEFAULT": ("1 234", "version 1 teaches determinism and what it costs"),
    "add_version_options": ("1 2 3 4", "each version's own switches"),
    "check_version_options": ("1 2 3 4", "what each version's kernels can take"),
    "describe_parts": ("1 2 3 4", "what each version computes with"),
    "causal_attention": ("1 234", "scores and softmax, or SDPA"),
    "Attention": ("1 2 3 4", "separate projections, fused ones behind a switch, on packed tensors, fused"),
    "FeedForward": ("1 2 3 4", "separate projections, fused ones behind a switch, on packed tensors, fused"),
    "RMSNorm": ("12 4", "PyTorch's fused norm; version 3's norm has a name of its own, for it takes the residual"),
    "Block": ("124 3", "version 3's norms add the residual"),
    "TinyLlama": ("1 24 3", "torch.compile; version 3's norms add the residual"),
    "build_model": ("12 34", "16-bit weights beside float32 masters"),
    "matrix_dtype": ("12 34", "16-bit weights beside float32 masters"),
    "make_optimizer": ("12 3 4", "PyTorch's AdamW, a kernel, PyTorch's fused AdamW"),
    "compute_loss": ("12 3 4", "autocast, kernels, a pinned SDPA backend"),
}

# The convention: one set of options, weights, batches, figures and JSON keys.
SHARED = set(
    """
    VERSION Config PRESETS DEFAULTS Parser add_model_options add_training_options add_parallel_options
    add_profiling_options add_version_options check_version_options describe_parts launch_ranks resolve_options
    check_sizes check_places parse_options
    model_config SyntheticStream TextStream load_data annotate rope_tables Attention FeedForward Block TinyLlama
    weight_shapes initial_weights canonical_views build_model matrix_dtype process_group parallel_model gather
    make_optimizer compute_loss PhaseClock Trainer
    parameters_trained flops_per_step training_state restore save_checkpoint newest_checkpoint PEAK_TFLOPS environment
    summarize write_metrics print_configuration print_step print_summary profile set_up_backend train run main
    """.split()
)


class Definition(NamedTuple):
    """Source text of a name and the lines it spans, counted from 0, the last one excluded."""

    text: str
    first: int
    last: int
    imported: bool


def bound_names(node):
    """Names that a top-level statement binds; those inside functions and classes are not top-level."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        return set()
    return set().union(*(bound_names(child) for child in ast.iter_child_nodes(node)))


def imports(statement):
    """Name -> what it stands for, of an import statement wherever it is nested."""
    bound = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.split(".")[0]] = f"import {alias.name}\n"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"from {node.module} import {alias.name}\n"
    return bound


def definitions(path):
    """Name -> its definitions in the file, in order; a name that is bound twice has two."""
    source = path.read_text(encoding="utf-8")
    lines, found = source.splitlines(keepends=True), {}
    for statement in ast.parse(source, str(path)).body:
        first = min([statement.lineno, *(d.lineno for d in getattr(statement, "decorator_list", []))]) - 1
        while first > 0 and lines[first - 1].startswith("#"):
            first -= 1
        text = "".join(lines[first : statement.end_lineno])
        for name in bound_names(statement):
            found.setdefault(name, []).append(Definition(text, first, statement.end_lineno, False))
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.If, ast.Try, ast.With)):
            for name, text in imports(statement).items():
                found.setdefault(name, []).append(Definition(text, first, statement.end_lineno, True))
    return found


def text_of(copies):
    return "".join(copy.text for copy in copies)


def group_of(name, version, forks):
    """The versions that share this version's text of the name, as a string; None where its fork does not tell."""
    groups = forks[name][0].split() if name in forks else ["all"]
    return next((group for group in groups if group == "all" or str(version) in group), None)


def drift(tables, forks):
    """(path, name, home) of each copy that differs from its home, the first of its group that defines the name."""
    home, differing = {}, []
    for version, (path, table) in enumerate(tables.items(), start=1):
        for name, copies in table.items():
            group = group_of(name, version, forks)
            origin = home.setdefault((name, group), path)
            if group and text_of(copies) != text_of(tables[origin][name]):
                differing.append((path, name, origin))
    return differing


def describe(tables, path, name, origin):
    """A sentence and the unified diff from the home of a name to its copy."""
    old, new = (text_of(tables[p][name]).splitlines(keepends=True) for p in (origin, path))
    changes = difflib.unified_diff(old, new, str(origin), str(path), n=1)
    return f"{name} of {path} differs from that of {origin}:\n" + "".join(changes).rstrip("\n")


def order_problems(tables):
    """A sentence for each pair of files whose common names stand in another order."""
    problems = []
    for (first, one), (second, two) in itertools.combinations(tables.items(), 2):
        common = [name for name in one if name in two and not (one[name][0].imported or two[name][0].imported)]
        common.sort(key=lambda name: one[name][0].first)
        moved = sorted(common, key=lambda name: two[name][0].first)
        for here, there in zip(common, moved, strict=True):
            if here != there:
                problems.append(f"{second} defines {there} where {first} has {here}: put them in the same order")
                break
    return problems


def fork_problems(tables, forks):
    """Sentences about what the fork list says and the files do not bear out."""
    problems, paths = [], list(tables)
    for name, (groups, _) in forks.items():
        defining = {str(version) for version, path in enumerate(paths, start=1) if name in tables[path]}
        if defining != set(groups) - {" "}:
            problems.append(
                f"{name} is a fork of {groups}, but versions {' '.join(sorted(defining)) or 'none'} define it"
            )
            continue
        text = {group: text_of(tables[paths[int(group[0]) - 1]][name]) for group in groups.split()}
        for one, two in itertools.combinations(text, 2):
            if text[one] == text[two]:
                problems.append(f"{name} is a fork between versions {one} and {two}, but their copies are equal")
    return problems


def check(paths, forks=None, shared=frozenset()):
    """What is wrong with the files, in their order: a list of sentences. forks and shared are as FORKS and SHARED."""
    forks = forks or {}
    tables = {path: definitions(path) for path in paths}
    problems = [describe(tables, *difference) for difference in drift(tables, forks)]
    problems += order_problems(tables) + fork_problems(tables, forks)
    for path, table in tables.items():
        problems += [f"{path} lacks {name}, which all versions share" for name in sorted(shared - set(table))]
    return problems


def fix(paths, forks=None):
    """Write each home definition over its copies that differ; returns how many statements were written."""
    tables = {path: definitions(path) for path in paths}
    edits = {path: {} for path in paths}
    for path, name, origin in drift(tables, forks or {}):
        old, new = tables[path][name], tables[origin][name]
        if len(old) == len(new) and not any(copy.imported for copy in old + new):
            edits[path].update({(o.first, o.last): n.text for o, n in zip(old, new, strict=True) if o.text != n.text})
    for path, replacements in edits.items():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for (first, last), text in sorted(replacements.items(), reverse=True):
            lines[first:last] = [text]
        if replacements:
            path.write_text("".join(lines), encoding="utf-8")
    return sum(map(len, edits.values()))


def print_difference(old, new):
    texts = [SCRIPTS[version].read_text(encoding="utf-8").splitlines(keepends=True) for version in (old, new)]
    names = [str(SCRIPTS[version].relative_to(REPOSITORY)) for version in (old, new)]
    sys.stdout.writelines(difflib.unified_diff(*texts, *names))


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="default: the four scripts")
    parser.add_argument("--fix", action="store_true", help="write the home definitions over the copies, then check")
    parser.add_argument("--diff", nargs=2, type=int, choices=SCRIPTS, metavar="VERSION", help="print what changes")
    return parser.parse_args(argv)


def main(argv=None):
    arguments = parse_arguments(argv)
    paths = arguments.files or list(SCRIPTS.values())
    shared = set() if arguments.files else SHARED
    forks = {} if arguments.files else FORKS
    try:
        if arguments.diff:
            print_difference(*arguments.diff)
            return 0
        if arguments.fix:
            print(f"{fix(paths, forks)} definitions written over copies that differed")
        problems = check(paths, forks, shared)
    except (OSError, SyntaxError) as error:
        print(f"same_code.py: {error}", file=sys.stderr)
        return 2
    print("\n".join(problems) or f"same name, same code: {len(paths)} files agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
