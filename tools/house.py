"""Measures the shape of the code: rooms, import circles, functions, lines. Prints JSON.

    python tools/house.py [--root OTHER_CHECKOUT]

Functions are counted with their nested ones; the length of a function is its lines of code without docstring, comments and blank
lines, its signature included. A private function counts as called once where the code of its module names it once besides its
definition. Figures are those of the product: past investigations, which lie with their records in benchmarks/results/, count in
"archived_lines" alone.
"""

import argparse
import ast
import graphlib
import importlib.util
import io
import json
import re
import statistics
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOMS = ("trainer", "privacy", "data")
ARCHIVE = "benchmarks/results/"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(text: str, name: str) -> ast.Module:
    """The tree of a file, its relative imports written out.

    Args:
        name: path of the file from the root of the project, `privacy/noise.py`.
    """
    tree = ast.parse(text, name)
    package = name.rpartition("/")[0].replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            node.module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            node.level = 0
    return tree


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, inside of functions too; what stands under `if TYPE_CHECKING` is free."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from runtime_imports(ast.Module(node.orelse, []))
        else:
            yield from runtime_imports(node)


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        graph[module] = set()
        for name in runtime_imports(tree):
            while name and name not in trees:
                name = name.rpartition(".")[0]
            if name and name != module:
                graph[module].add(name)
    return graph


def import_circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of modules that import each other, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no blank lines, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def names_in(tree: ast.AST) -> Counter[str]:
    """How often code uses each name, by itself or as an attribute."""
    named = (node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    return Counter(node.id if isinstance(node, ast.Name) else node.attr for node in named)


def measure(root: Path) -> dict[str, object]:
    """All figures of a checkout."""
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True)
    files = listed.stdout.splitlines()
    code = [name for name in files if name.endswith(".py") and not name.startswith("tests/")]
    sources = [name for name in code if not name.startswith(ARCHIVE)]
    texts = {name: (root / name).read_text() for name in sources}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in sources}
    trees = {module: parse(texts[name], name) for module, name in modules.items()}
    lengths: list[int] = []
    called_once = 0
    for module, name in modules.items():
        lines = code_lines(texts[name])
        uses = names_in(trees[module])
        for node in ast.walk(trees[module]):
            if isinstance(node, Function):
                assert node.end_lineno is not None
                lengths.append(len(lines.intersection(range(node.lineno, node.end_lineno + 1))))
                is_private = node.name.startswith("_") and not node.name.startswith("__")
                called_once += is_private and uses[node.name] == 1
    return {
        "modules_directly_in": {
            room: sum(bool(re.fullmatch(rf"{room}/(?!__init__)\w+\.py", name)) for name in sources) for room in ROOMS
        },
        "import_circle": import_circle(import_graph(trees)),
        "simple_namespace_outside_tests": sum(names_in(tree)["SimpleNamespace"] > 0 for tree in trees.values()),
        "functions": len(lengths),
        "median_function_length": statistics.median(lengths),
        "private_functions_called_once": round(called_once / len(lengths), 3),
        "source_files": len(sources),
        "source_lines": sum(text.count("\n") for text in texts.values()),
        "archived_lines": sum((root / name).read_text().count("\n") for name in code if name.startswith(ARCHIVE)),
        "docs_pages": sum(bool(re.fullmatch(r"docs/\w+\.md", name)) for name in files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the shape of the code and prints JSON.")
    parser.add_argument(
        "--root", type=Path, default=Path(__file__).resolve().parents[1], help="a checkout; this one by default"
    )
    print(json.dumps(measure(parser.parse_args().root), indent=1))


if __name__ == "__main__":
    main()
