"""Measures the size and shape of the code, tests and pages of a checkout. Prints JSON.

    python tools/house.py [--root OTHER_CHECKOUT]

Source is every Python file outside tests/, programs beside records included; templates, shell scripts and notebooks count
beside it. Functions are counted with their nested ones; the length of a function is its lines of code without docstring,
comments and blank lines, its signature included. `tools/life_cycle.py` measures which statements a run executes.
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
from collections.abc import Iterable, Iterator
from pathlib import Path

OTHER_SOURCE = (".j2", ".sh", ".sbatch", ".ipynb")
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
            node.module = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), package
            )
            node.level = 0
    return tree


def runtime_imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports, inside of functions too; what stands under `if TYPE_CHECKING` is free."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
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
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return lines


def fields_of(tree: ast.Module) -> dict[str, list[tuple[str, str]]]:
    """Class -> (name, type) of each annotated attribute that it declares itself."""
    return {
        node.name: [
            (item.target.id, ast.unparse(item.annotation))
            for item in node.body
            if isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and "ClassVar" not in ast.unparse(item.annotation)
        ]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def recipe_keys(trees: Iterable[ast.Module], root: str = "RunConfig") -> list[str]:
    """Leaf keys of the recipe, `section.key`, read from its classes and those that they extend; nothing is imported."""
    trees = list(trees)
    classes = {name: fields for tree in trees for name, fields in fields_of(tree).items()}
    extended = {
        node.name: [ast.unparse(base) for base in node.bases]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def fields(name: str) -> list[tuple[str, str]]:
        return [
            *(pair for base in extended.get(name, []) for pair in fields(base)),
            *classes.get(name, []),
        ]

    def leaves(name: str, prefix: str) -> Iterator[str]:
        for field, annotation in fields(name):
            section = next(
                (word for word in re.findall(r"\w+\b(?!\()", annotation) if classes.get(word)), None
            )
            yield from leaves(section, f"{prefix}{field}.") if section else [f"{prefix}{field}"]

    return list(leaves(root, ""))


def lines_of_tests(texts: Iterable[str]) -> dict[str, int]:
    """Lines of all test files, of code, inside test functions, and in files without a test."""
    counted = Counter[str]()
    for text in texts:
        tests = [
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, Function) and node.name.startswith("test_")
        ]
        counted["lines"] += text.count("\n")
        counted["code"] += len(code_lines(text))
        counted["inside_tests"] += sum(
            (node.end_lineno or 0)
            - min([node.lineno, *(one.lineno for one in node.decorator_list)])
            + 1
            for node in tests
        )
        counted["in_files_without_a_test"] += 0 if tests else text.count("\n")
        counted["files"] += 1
        counted["tests"] += len(tests)
    return dict(counted)


def measure(root: Path) -> dict[str, object]:
    """All figures of a checkout."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True
    )
    files = [
        name
        for name in listed.stdout.splitlines()
        if (root / name).is_file() and not (root / name).is_symlink()
    ]
    texts = {
        name: (root / name).read_text() for name in files if name.endswith((".py", *OTHER_SOURCE))
    }
    source = {
        name: text
        for name, text in texts.items()
        if name.endswith(".py") and not name.startswith("tests/")
    }
    others = sum(
        text.count("\n")
        for name, text in texts.items()
        if name.endswith(OTHER_SOURCE) and not name.startswith("tests/")
    )
    code = {name: code_lines(text) for name, text in source.items()}
    trees = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): parse(text, name)
        for name, text in source.items()
    }
    lengths = [
        len(code[name].intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
        for name, tree in zip(source, trees.values(), strict=True)
        for node in ast.walk(tree)
        if isinstance(node, Function)
    ]
    rooms = Counter[str]()
    for name, text in source.items():
        folders = name.split("/")[:-1]
        for depth in range(1, min(len(folders), 2) + 1):
            rooms["/".join(folders[:depth])] += text.count("\n")
    filled = sum(bool(line.strip()) for text in source.values() for line in text.splitlines())
    code_total = sum(len(lines) for lines in code.values())
    plan_fields = [
        field
        for module in ("privacy.plan", "privacy.plan_request")
        for name in ("Choices", "PlanChoices", "PrivacyPlan")
        for field, _ in fields_of(trees[module]).get(name, [])
    ]
    named_in = {
        field: sum(bool(re.search(rf"\b{field}\b", text)) for text in source.values())
        for field in plan_fields
    }
    pages = [
        name
        for name in files
        if name.endswith(".md") and not name.startswith(("benchmarks/results/", "tests/"))
    ]
    return {
        "source": {
            "lines": sum(text.count("\n") for text in source.values()),
            "code": code_total,
            "docstrings_and_comments_per_line_of_code": round(filled / code_total - 1, 3),
            "templates_scripts_notebooks": others,
            "files": len(source),
            "verify.py": source["privacy/verify.py"].count("\n"),
            "functions": len(lengths),
            "median_function_length": statistics.median(lengths),
        },
        "tests": lines_of_tests(
            text
            for name, text in texts.items()
            if name.startswith("tests/") and name.endswith(".py")
        ),
        "words_of_pages": sum(len((root / name).read_text().split()) for name in pages),
        "root_files": sum("/" not in name for name in files),
        "recipe_keys": len(
            recipe_keys(
                tree
                for name, tree in trees.items()
                if name.startswith(("trainer.config", "privacy."))
            )
        ),
        "source_files_that_name_a_plan_field": {
            "median": statistics.median(named_in.values()),
            **dict(sorted(named_in.items(), key=lambda item: -item[1])),
        },
        "import_circle": import_circle(import_graph(trees)),
        "lines_per_room": dict(sorted(rooms.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures the size and shape of the code and prints JSON."
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parents[1],
        help="a checkout; this one by default",
    )
    print(json.dumps(measure(parser.parse_args().root), indent=1))


if __name__ == "__main__":
    main()
