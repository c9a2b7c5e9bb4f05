"""Measures the size and shape of the code, tests and pages of a checkout. Prints JSON.

    python tools/house.py [--root OTHER_CHECKOUT]

Source is every Python file outside tests/, programs beside records included; templates, shell scripts and notebooks count
beside it. Functions are counted with their nested ones; the length of a function is its lines of code without docstring,
comments and blank lines, its signature included. Under `text` stand measures that no formatter moves, beside the smallest and
the largest of six projects that people like to read. `--life_cycle` runs tools/life_cycle.py too, which takes minutes.
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
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ANCHORS = {
    "expressions_and_statements_per_statement": {
        "Opacus": 5.97,
        "torchtitan": 6.40,
        "nanochat": 6.50,
        "JAX Privacy": 6.53,
        "optax": 6.65,
        "open_clip": 6.81,
    },
    "percent_of_simple_statements_with_over_20_expressions": {"least": 0.9, "most": 2.4},
    "percent_of_names_that_are_no_nouns": {"least": 0.0, "most": 0.4},
    "tuple_assignments_per_1000_lines": {"least": 0.1, "most": 9.9},
}
"""Measured on 2026-11-28 in the source of each project, its tests left out."""
NO_NOUNS = """
    found known seen said asked held kept mine own one ones some other others there here now then
    before after given wanted named listed taken begun left more less most stated told what where
    who again both each all these those such same alike whole of at as_ it inside outside around
    beside behind apart together
"""
"""Pronouns, participles and adverbs: a variable of such a name sends its reader back."""
COMPOUND = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.If,
    ast.For,
    ast.While,
    ast.With,
    ast.Try,
    ast.Match,
)
CLIPPING_FUNCTION = re.compile(r"\b(per_layer|PerLayer)\b")
"""The clipping function that was added last: who adds another touches the files that name it."""
RECORDS = ("benchmarks/results/", "tests/records/")
OTHER_SOURCE = (".j2", ".sh", ".sbatch", ".ipynb")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(text: str, name: str) -> ast.Module:
    """The tree of a file, its relative imports written out.

    Args:
        name: path of the file from the root of the project, `privacy/noise/source.py`.
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


def imported_names(tree: ast.AST, *, with_types: bool = False) -> Iterator[str]:
    """Yields dotted names that a module imports, inside of functions too.

    Args:
        with_types: also what stands under `if TYPE_CHECKING`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            not with_types
            and isinstance(node, ast.If)
            and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        ):
            yield from imported_names(ast.Module(node.orelse, []))
        else:
            yield from imported_names(node, with_types=with_types)


def import_graph(trees: dict[str, ast.Module], *, with_types: bool = False) -> dict[str, set[str]]:
    """Module -> the modules of the project that it imports; `with_types` as in `imported_names`."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        graph[module] = set()
        for name in imported_names(tree, with_types=with_types):
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


def names_of(tree: ast.AST) -> Iterator[str]:
    """Names of all variables that a module sets and of all arguments that its functions take."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def count_of(tree: ast.AST, kind: Any) -> int:
    """How many nodes of a kind a tree has, its root included."""
    return sum(isinstance(node, kind) for node in ast.walk(tree))


def sets_a_tuple(node: ast.AST) -> bool:
    """Whether a statement has the form `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def measure_text(trees: Iterable[ast.Module], code: int) -> dict[str, Any]:
    """Measures that a formatter does not move, and the anchors' values.

    Args:
        code: lines of code of all trees together.
    """
    trees = list(trees)
    nodes = [node for tree in trees for node in ast.walk(tree)]
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    functions = [node for node in nodes if isinstance(node, Function)]
    names = [name for tree in trees for name in names_of(tree)]
    sizes = [count_of(node, ast.expr) for node in statements if not isinstance(node, COMPOUND)]
    num_expressions = sum(isinstance(node, ast.expr) for node in nodes)
    num_tuples = sum(map(sets_a_tuple, nodes))
    vague = Counter(name for name in names if name in NO_NOUNS.split())
    return {
        "statements": len(statements),
        "expressions_and_statements_per_statement": round(1 + num_expressions / len(statements), 2),
        "percent_of_simple_statements_with_over_20_expressions": round(
            100 * sum(size > 20 for size in sizes) / len(sizes), 2
        ),
        "closures": sum(count_of(node, Function) - 1 for node in functions),
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        "percent_of_names_that_are_no_nouns": round(100 * vague.total() / len(names), 2),
        "names_that_are_no_nouns": dict(vague.most_common(12)),
        "tuple_assignments_per_1000_lines": round(1000 * num_tuples / code, 1),
        "anchors": ANCHORS,
    }


def measure(root: Path) -> dict[str, Any]:
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
        for module in ("privacy.plan.numbers", "privacy.plan.request")
        for name in ("Choices", "PlanChoices", "PrivacyPlan")
        for field, _ in fields_of(trees[module]).get(name, [])
    ]
    named_in = {
        field: sum(bool(re.search(rf"\b{field}\b", text)) for text in source.values())
        for field in plan_fields
    }
    pages = [
        name for name in files if name.endswith(".md") and not name.startswith((*RECORDS, "tests/"))
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
        "text": measure_text(trees.values(), code_total),
        "files_to_touch_for_a_clipping_function": sum(
            bool(CLIPPING_FUNCTION.search((root / name).read_text()))
            for name in files
            if name.endswith((".py", ".j2", ".md")) and not name.startswith(RECORDS)
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
    parser.add_argument(
        "--life_cycle", action="store_true", help="also which statements a training executes"
    )
    arguments = parser.parse_args()
    figures = measure(arguments.root)
    if arguments.life_cycle:
        program = Path(__file__).with_name("life_cycle.py")
        words = [sys.executable, str(program), "--root", str(arguments.root)]
        executed = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
        figures["executed"] = json.loads(executed)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
