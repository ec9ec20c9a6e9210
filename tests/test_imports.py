"""Dependencies point one way, and heavy libraries are imported where they are needed and not before."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import longchat_cli

ROOT = Path(longchat_cli.__file__).parent
MODULES = {
    ".".join(["longchat_cli", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
HEAVY = ("torch", "transformers", "bitsandbytes", "triton", "flash_attn")

LAYERS = [
    {"errors", "config", "settings", "sampling", "terminal_text", "terminal", "database", "logs", "pages"},
    {"kernels"},
    {"attention"},
    {
        "tokens",
        "constrain",
        "prompt",
        "thinking",
        "prose",
        "wording",
        "documents",
        "models",
        "state",
        "engine",
    },
    {"local", "prefix", "recall"},
    {"citations", "sources", "attribution", "whole", "memory", "subjects"},
    {
        "ask",
        "answering",
        "pinned",
        "chat",
        "exchange",
        "sessions",
        "evaluation",
        "doctor",
        "inspection",
        "estimate",
        "benchmark",
    },
    {"repl"},
    {"cli", "commands", "__main__"},
]
"""Rooms from the bottom up: a room imports its own layer and those below."""

LIGHT = [
    "errors", "config", "settings", "database", "sessions", "thinking", "exchange",
    "constrain", "logs", "sampling", "terminal_text", "terminal", "engine", "prompt", "tokens", "prose",
    "documents", "models.catalog", "models.fetch", "models.files", "attention.__init__", "ask", "answering",
    "pinned", "chat", "inspection", "models.memory", "repl", "cli", "commands", "__main__", "__init__",
    "evaluation.facts", "evaluation.lines", "recall.lexical", "recall.passages", "recall.kept", "pages",
    "citations", "wording", "sources", "whole", "memory", "subjects",
]  # fmt: skip
"""Modules that import neither torch nor transformers at module level."""


def imports(path: Path, module_level: bool = False) -> Iterator[tuple[str, int]]:
    """(imported module, line) of a file; at module level without functions and TYPE_CHECKING blocks."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if typing_only or (module_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))):
                continue
            yield child
            yield from walk(child)

    for node in walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module or "", node.lineno
            # `from longchat_cli import kernels` imports a module, not a name.
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    yield f"{node.module}.{alias.name}", node.lineno


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_room_has_its_place():
    placed = set().union(*LAYERS)
    assert {room(module) for module in MODULES} - {"__init__"} <= placed


def test_dependencies_point_one_way():
    height = {name: level for level, names in enumerate(LAYERS) for name in names}
    wrong = [
        f"{module}:{line} imports {target}"
        for module, path in MODULES.items()
        for target, line in imports(path)
        if target.startswith("longchat_cli.") and module != "longchat_cli"
        if height[room(target)] > height[room(module)]
    ]
    assert not wrong


def test_kernels_and_attention_know_nothing_of_models_and_text():
    allowed = {
        "kernels": {"kernels", "errors", "terminal_text"},  # the benchmark prints tables
        "attention": {"attention", "kernels", "errors"},
    }
    for module, path in MODULES.items():
        for target, line in imports(path):
            if room(module) in allowed and target.startswith("longchat_cli."):
                assert room(target) in allowed[room(module)], f"{module}:{line} imports {target}"


def test_no_cycles_at_import():
    graph = {
        module: {target for target, _ in imports(path, module_level=True) if target in MODULES}
        for module, path in MODULES.items()
    }

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            # A package and its own parts are one room: `a` imports `a.b`, which may import `a.c`.
            for target in graph[module]:
                if not f"{target}.".startswith(f"{module}.") and not module.startswith(f"{target}."):
                    visit(target, (*trail, module))
            done.add(module)

    done: set[str] = set()
    for module in MODULES:
        visit(module, ())


def test_only_hf_touches_transformers_internals():
    """The cache interface is pinned in one place; elsewhere only what transformers documents for users."""
    for module, path in MODULES.items():
        for target, line in imports(path):
            if target.startswith("transformers.") and target != "transformers.utils":
                assert module == "longchat_cli.attention.hf", f"{module}:{line} imports {target}"
            if target == "transformers" and room(module) == "attention":
                assert module == "longchat_cli.attention.hf", f"{module}:{line} imports {target}"


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_import_nothing_heavy(name):
    module = f"longchat_cli.{name}".removesuffix(".__init__")
    paths = [
        path for other, path in MODULES.items() if other == module or (other + ".").startswith(module + ".")
    ]
    if name.endswith("__init__"):
        paths = [MODULES[module]]
    assert paths, f"no module {module}"
    for path in paths:
        for target, line in imports(path, module_level=True):
            assert target.split(".")[0] not in HEAVY, f"{path.name}:{line} imports {target}"


def test_light_modules_stay_light_when_really_imported():
    """What the modules import in turn counts too: ask a fresh interpreter."""
    modules = [f"longchat_cli.{name}".removesuffix(".__init__") for name in LIGHT if name != "__main__"]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    found = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        "    assert not found, f'{name} brings {found}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-800:]


def test_a_lean_chat_needs_no_transformers():
    code = (
        "import sys\n"
        "import longchat_cli.local, longchat_cli.models.lean, longchat_cli.models.load\n"
        "assert 'torch' in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-800:]
