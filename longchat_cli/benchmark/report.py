"""What the runs say: medians with their spread, ratios to the other program, plots, a section of a page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli.benchmark.process import Row
from longchat_cli.config import format_bytes
from longchat_cli.errors import CannotCreate, Unavailable
from longchat_cli.terminal_text import table


@dataclass(frozen=True)
class Spread:
    """Median, least and largest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def show(self) -> str:
        """`1,012 (990-1,020)`; a single measurement has no spread."""
        if self.low == self.high:
            return _number(self.median)
        return f"{_number(self.median)} ({_number(self.low)}-{_number(self.high)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Cell:
    """All runs of one contender at one length."""

    name: str
    peer: bool
    length: int
    runs: tuple[Row, ...]

    def spread(self, of: Callable[[Row], float]) -> Spread:
        return Spread.of([of(run) for run in self.runs])

    @property
    def first(self) -> Spread:
        """Seconds to the first token."""
        return self.spread(lambda run: run["first_s"])

    @property
    def prefill(self) -> Spread:
        """Tokens a second."""
        return self.spread(lambda run: self.length / run["first_s"])

    @property
    def decode(self) -> Spread:
        """Tokens a second."""
        return self.spread(lambda run: 1 / run["step_s"])

    def middle(self, figure: str) -> float:
        return statistics.median(run[figure] for run in self.runs)

    @property
    def asked(self) -> Row | None:
        """The least that a step and a prompt ask of the machine, where it was counted."""
        return next((run["asked"] for run in self.runs if "asked" in run), None)


def cells(rows: Iterable[Row]) -> list[Cell]:
    """The runs that gave figures, gathered; by length, then as they came."""
    gathered: dict[tuple[int, bool, str], list[Row]] = {}
    for row in rows:
        if "failed" not in row:
            gathered.setdefault((row["length"], row["peer"], row["name"]), []).append(row)
    ordered = sorted(gathered.items(), key=lambda item: item[0][0])
    return [Cell(name, peer, length, tuple(runs)) for (length, peer, name), runs in ordered]


@dataclass(frozen=True)
class Machine:
    """The best rates that any run met: a busy machine must not make a limit look near."""

    rates: tuple[Row, ...]

    @classmethod
    def of(cls, found: Sequence[Cell]) -> Machine:
        return cls(tuple(run["rates"] for cell in found for run in cell.runs if "rates" in run))

    def step(self, asked: Row) -> float:
        """Seconds below which no step can be: its bytes read as fast as any block at least as large was."""
        large = [rate for rate in self.rates if rate["bytes"] >= asked["step_bytes"]]
        return asked["step_bytes"] / max(rate["bytes_per_s"] for rate in large or self.rates)

    def prompt(self, asked: Row) -> float:
        """Seconds below which no prompt can be read."""
        return asked["prompt_flops"] / max(rate["flops_per_s"] for rate in self.rates)


def best(found: Sequence[Cell], length: int) -> tuple[Cell, Cell] | None:
    """The other program's fastest forms at a length: for prompts and for decoding."""
    theirs = [cell for cell in found if cell.peer and cell.length == length]
    if not theirs:
        return None
    return max(theirs, key=lambda c: c.prefill.median), max(theirs, key=lambda c: c.decode.median)


def show(result: Mapping[str, Any]) -> str:
    """Everything as Markdown that reads well in a terminal."""
    found = cells(result["rows"])
    parts = [_heading(result), _own([cell for cell in found if not cell.peer])]
    parts += _spent([cell for cell in found if not cell.peer])
    if any(cell.peer for cell in found):
        parts += [_against(found), _forms([cell for cell in found if cell.peer])]
    failed = {
        f"{row['name']}, {row['length']:,} tokens: {row['failed']}": None
        for row in result["rows"]
        if "failed" in row
    }
    return "\n\n".join([*parts, *(["Not measured:\n" + "\n".join(failed)] if failed else [])])


def _heading(result: Mapping[str, Any]) -> str:
    machine, rows = result["machine"], result["rows"]
    loads = [row["load"] for row in rows if row["load"] is not None]
    abouts = {row["peer"]: row["about"] for row in rows if "about" in row}
    lines = [
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['platform']}; {machine['threads']} threads each",
        f"load average {min(loads):.1f} to {max(loads):.1f} while it ran"
        if loads
        else "load average not known",
        f"longchat {machine['longchat']}, Python {machine['python']}",
    ]
    if own := abouts.get(False):
        lines[-1] += f", torch {own['torch']} ({own['cpu_capability']}), {own['model']} in {own['dtype']}"
        lines.append(f"a decoded token reads {format_bytes(own['step_weights'])} of weights")
        lines += own["notes"]
    if theirs := abouts.get(True):
        waits = "asleep" if any(row["peer"] and row["waits"] for row in rows) else "spinning"
        lines.append(f"llama-cpp-python {theirs['version']}, threads waiting {waits}; {theirs['build']}")
    return "\n".join(f"- {line}" for line in lines)


OWN = (
    "method", "tokens", "first token s", "prefill tok/s", "of limit", "decode tok/s", "limit", "of limit",
    "KV held", "resident", "of kept", "served by",
)  # fmt: skip


def _own(found: Sequence[Cell]) -> str:
    machine = Machine.of(found)
    return table(OWN, (_own_line(cell, machine) for cell in found))


def _own_line(cell: Cell, machine: Machine) -> list[str]:
    asked, held, resident = cell.asked, cell.middle("held"), cell.middle("resident")
    served = cell.runs[0]["served"]
    reached = ["-", "-", "-"]
    if asked:
        prompt, step = machine.prompt(asked), machine.step(asked)
        reached = [f"{prompt / cell.first.median:.0%}", _number(1 / step), f"{step * cell.decode.median:.0%}"]
    return [
        cell.name,
        f"{cell.length:,}",
        cell.first.show(),
        cell.prefill.show(),
        reached[0],
        cell.decode.show(),
        *reached[1:],
        format_bytes(int(held)),
        format_bytes(int(resident)),
        f"{resident / (held + cell.runs[0]['kept']):.2f}",
        "; ".join(_calls(served[part]) for part in ("prompt", "steps")),
    ]


def _spent(found: Sequence[Cell]) -> list[str]:
    """Where the time of a step goes, of cells where the native library says so: a step is one call of it."""
    told = [cell for cell in found if all("spent" in run for run in cell.runs)]
    if not told:
        return []
    phases = list(told[0].runs[0]["spent"])
    lines = []
    for cell in told:
        each = [statistics.median(run["spent"][phase] for run in cell.runs) for phase in phases]
        shown = (f"{seconds * 1e3:.2f} ({seconds / sum(each):.0%})" for seconds in each)
        lines.append([cell.name, f"{cell.length:,}", f"{sum(each) * 1e3:.2f}", *shown])
    header = ("method", "tokens", "step", *phases)
    return ["Where the time of a step goes, in milliseconds:\n\n" + table(header, lines)]


def _calls(served: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in served.items()) or "none"


def _against(found: Sequence[Cell]) -> str:
    header = ("method", "tokens", "prefill tok/s", "llama.cpp", "ratio", "decode tok/s", "llama.cpp", "ratio")
    lines = []
    for cell in found:
        rivals = best(found, cell.length)
        if cell.peer or rivals is None:
            continue
        prompt, steps = rivals
        lines.append(
            [
                cell.name,
                f"{cell.length:,}",
                cell.prefill.show(),
                prompt.prefill.show(),
                f"{cell.prefill.median / prompt.prefill.median:.2f}x",
                cell.decode.show(),
                steps.decode.show(),
                f"{cell.decode.median / steps.decode.median:.2f}x",
            ]
        )
    return "Against the fastest form of llama.cpp in each cell:\n\n" + table(header, lines)


def _forms(found: Sequence[Cell]) -> str:
    header = ("llama.cpp with", "tokens", "runs", "prefill tok/s", "decode tok/s", "state", "resident")
    lines = (
        [
            cell.name,
            f"{cell.length:,}",
            str(len(cell.runs)),
            cell.prefill.show(),
            cell.decode.show(),
            format_bytes(int(cell.middle("held"))),
            format_bytes(int(cell.middle("resident"))),
        ]
        for cell in found
    )
    return table(header, lines)


def require_plots() -> None:
    """Raises Unavailable where matplotlib is not installed."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise Unavailable("no plots", "matplotlib is not installed", "pip install 'longchat-cli[bench]'")


def plot(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """step.png and memory.png in `folder`: a step's time and the memory held against the length.

    Raises CannotCreate.
    """
    found = cells(result["rows"])
    step = {name: [(c.length, 1e3 / c.decode.median) for c in line] for name, line in _lines(found).items()}
    held = {
        name: [(c.length, c.middle("held") / 2**20) for c in line] for name, line in _lines(found).items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _draw(step, "milliseconds a decoded token", folder / "step.png"),
            _draw(held, "MiB of keys and values held", folder / "memory.png"),
        ]
    except OSError as error:
        raise CannotCreate(f"no plots in {folder}", error.strerror or str(error)) from error


def _lines(found: Sequence[Cell]) -> dict[str, list[Cell]]:
    """Cells by method; the other program is one line, its form that decodes fastest at each length."""
    lines: dict[str, list[Cell]] = {}
    for cell in found:
        rivals = best(found, cell.length)
        if not cell.peer or (rivals and cell is rivals[1]):
            lines.setdefault("llama.cpp" if cell.peer else cell.name, []).append(cell)
    return lines


def _draw(lines: Mapping[str, Sequence[tuple[float, float]]], label: str, file: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        axes.plot(
            *zip(*points, strict=True), marker="o", linestyle="--" if name == "llama.cpp" else "-", label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(label)
    axes.set_xticks(
        ticks := sorted({x for points in lines.values() for x, _ in points}), [f"{x:,.0f}" for x in ticks]
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    return file


PAGE = """\
# Benchmarks

Every figure is measured by `longchat bench`, which replaces the sections below. llama.cpp is measured through
llama-cpp-python; on a CPU with AVX512 it was built by

```
CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=ON \\
  -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX512_VBMI=ON" \\
  pip install --no-binary llama-cpp-python llama-cpp-python
```

(its build for AMX crashed with an illegal instruction on a virtual machine). It reads the same file and the
same text as longchat, and that file requantised by itself, with its flash attention on and off; its fastest
form counts in each cell.
"""
NOTES = """\
*first token*: seconds from the prompt's ids to the first token chosen, the model loaded and warm. *prefill*:
the prompt's tokens by these seconds. *decode*: {decode} tokens of the text fed one by one after the prompt,
the likeliest chosen each time. Medians of {repeat} runs (least-largest), each in a process of its own,
longchat's and the other's in turn. *limit* of a decoded token: the weights in the form that serves and the
visible keys and values, by the rate at which this machine reads a block as large; of a prompt: the FLOPs
of weights and visible pairs, by the rate of its matrix products. *resident*: memory of the process beyond
that of importing torch; *of kept*: as a multiple of the weights in all forms in memory and the keys and
values held. *served by*: calls of each attention kernel, for the prompt and for the steps after it.
Where the time of a step goes is measured over as many further steps: *python* is all around the one call of
the native library; of its first thread, *inputs* are norms, residuals, the gate and their quantizing,
*products* those of the layers, *rotation* also places new keys and values and plans attention, *waiting* is
for the other threads, *last product* the vocabulary's."""


def page(result: Mapping[str, Any], command: str) -> str:
    """A page's section: the command, what the columns mean, the tables."""
    notes = NOTES.format(**result["plan"])
    return f"`{command}`\n\n{notes}\n\n{show(result)}"


def insert(file: Path, section: str, text: str) -> None:
    """Put `text` between the marks of `section` in `file`; what stands around them stays.

    A file without the marks gets them at its end; a new file begins with PAGE. Raises CannotCreate.
    """
    begin, end = f"<!-- {section} -->", f"<!-- end of {section} -->"
    block = f"{begin}\n{text}\n{end}"
    try:
        page = file.read_text(encoding="utf-8") if file.exists() else PAGE
        marked = re.compile(re.escape(begin) + ".*" + re.escape(end), re.DOTALL)
        changed = (
            marked.sub(lambda _: block, page) if marked.search(page) else f"{page.rstrip()}\n\n{block}\n"
        )
        file.write_text(changed, encoding="utf-8")
    except OSError as error:
        raise CannotCreate(f"cannot write {file}", error.strerror or str(error)) from error
