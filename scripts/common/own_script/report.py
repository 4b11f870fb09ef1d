"""Write the report of compare_training.py: the verdict first, then a row for each thing that was compared."""

from common.command_line import printable
from common.own_script.judge import folded
from common.own_script.session import NEW, OLD
from common.ratios import counted, median, noise_line
from common.tables import markdown, markdown_table, rounded

WORDS = {  # kind: one, several
    "outputs": ("output", "outputs"),
    "losses": ("loss", "losses"),
    "gradients": ("gradient after backward", "gradients after backward"),
    "stepped": ("gradient at the step", "gradients at the step"),
    "updates": ("update", "updates"),
    "buffers": ("buffer", "buffers"),
}


def number(value):
    return "0" if not value else f"{value:.2g}"


def row_of(kind, count, worst, loose):
    """Return the row on what was compared of a kind, and on what one rounding changes too much to be compared."""
    text = f"{count} {WORDS[kind][count != 1]}"
    if worst:
        text += f", off by at most {number(worst.error)} ({worst.name}), allowed {number(worst.bound)}"
    if loose:
        text += f"; not compared, as one rounding changes old's own by as much as they are: {folded(loose)}"
    return text


def work_of(step):
    """Return the number of tokens or samples of a recorded step, and the word for them; None where no batch tells."""
    batches = [call["data"][0] for call in step["calls"] if call["data"]]
    if not batches or not batches[0].dim():
        return None
    if batches[0].dim() == 2 and not batches[0].is_floating_point():
        return sum(batch.numel() for batch in batches), "tokens"
    return sum(len(batch) for batch in batches), "samples"


def weights_row(pairs):
    packed = [pair for pair in pairs if len(pair.old + pair.new) > 2]
    renamed = [pair for pair in pairs if len(pair.old + pair.new) == 2 and pair.old != pair.new]
    text = f"{counted(len(pairs), 'tensor')}, all with old's values"
    if packed:
        text += f"; {len(packed)} packed, such as {packed[0]}"
    if renamed:
        text += f"; {len(renamed)} renamed, such as {renamed[0]}"
    return text


def speed_rows(speed, session, recorded, note):
    """Return the rows on a speed; note: what every one of them has to say."""
    times = {name: rounded(1e3 * median(values)) for name, values in speed.seconds.items()}
    how = f"{counted(len(speed.seconds[OLD]), 'round')} over {counted(speed.starts, 'start')}"
    if not session.together:
        how += ", each process alone because two don't fit into memory"
    found = speed.gain()
    rows = {
        "step": f"old {times[OLD]} ms, new {times[NEW]} ms ({how}){note}",
        "old / new": found.range_text() + note,
        "noise": noise_line(OLD, found.noise).replace("Timed", "timed", 1),
    }
    if speed.memory[OLD]:
        rows["memory"] = f"peak: old {rounded(speed.memory[OLD])} MiB, new {rounded(speed.memory[NEW])} MiB{note}"
    work = {name: work_of(recorded[name].steps[0]) for name in (OLD, NEW)}
    if all(work.values()):
        per_second = {name: rounded(work[name][0] / median(speed.seconds[name])) for name in work}
        rows[f"{work[OLD][1]}/s"] = f"old {per_second[OLD]}, new {per_second[NEW]}{note}"
    return rows


def as_text(content):
    old, new = (printable(content[name]) for name in ("old", "new"))  # a line break in a name makes no line of its own
    lines = [f"compare_training: {old}", f"          versus: {new}", ""]
    lines.append(f"{'verdict':<12}{content['verdict']}")
    if content["reason"]:
        lines.append(f"{'':<12}{content['reason']}")
    if content["module"]:
        lines.append(f"{'':<12}it begins in {content['module']}")
    lines.append("")
    return "\n".join(lines + [f"{name:<12}{text}" for name, text in content["rows"].items()])


def as_markdown(content):
    """Return the report for a pull request."""
    title = f"**{content['verdict']}**"
    if content["reason"]:
        title += f": {markdown(content['reason'])}"
    rows = [["old", f"`{content['old']}`"], ["new", f"`{content['new']}`"], *content["rows"].items()]
    return f"{title}\n\n{markdown_table(['what', 'result'], rows, left=2)}\n"
