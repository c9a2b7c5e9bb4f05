"""Measures the size and shape of the code, tests and pages of a checkout. Prints JSON.

    python tools/house.py [--root OTHER_CHECKOUT]

Source is every Python file outside tests/, programs beside records included; templates, shell
scripts and notebooks have a count of their own. Functions are counted with their nested ones; the
length of a function is its lines of code without docstring, comments and blank lines, its signature
included. `text` has measures that no formatter moves, and their anchors: the least and the most of
six projects that people like to read. `--life_cycle` runs tools/life_cycle.py too, which takes
minutes.
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
    "percent_of_public_docstrings_without_a_verb": {"least": 3, "most": 12},
}
"""Measured on 2026-11-28 in the source of each project, its tests left out."""
NO_NOUNS = """
    found known seen said asked held kept mine own one ones some other others there here now then
    before after given wanted named listed taken begun left more less most stated told what where
    who again both each all these those such same alike whole of at as_ it inside outside around
    beside behind apart together
"""
"""Pronouns, participles and adverbs: a variable of such a name sends its reader back."""
VERB = re.compile(r"[A-Z][a-z]+([^su]s|ses)")
"""The third person of a verb at the beginning of a sentence; plural nouns have this form too."""
NO_VERBS = {"This", "Its", "These", "Those", "Always", "Numbers", "Rows"}
BEHIND_A_NOUN = {"of", "that", "which", "in", "are", "is", "for", "and"}
"""The word behind a first noun ("Names of ..."), where a verb has its object."""
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
"""The clipping function that was added last: the next one will touch the files that name it."""
RECORDS = ("benchmarks/results/", "tests/records/")
OTHER_SOURCE = (".j2", ".sh", ".sbatch", ".ipynb")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def parse(text: str, name: str) -> ast.Module:
    """Returns the tree of a file, its relative imports written out.

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
        with_types: also the imports under `if TYPE_CHECKING`.
    """
    type_tests = () if with_types else ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in type_tests:
            yield from imported_names(ast.Module(node.orelse, []))
        else:
            yield from imported_names(node, with_types=with_types)


def import_graph(trees: dict[str, ast.Module], *, with_types: bool = False) -> dict[str, set[str]]:
    """Returns module -> modules of the project that it imports.

    Args:
        with_types: as in `imported_names`.
    """
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
    """Returns a circle of modules that import each other, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def code_lines(text: str) -> set[int]:
    """Returns the numbers of lines with code; without blank lines, comments and docstrings."""
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
    """Returns class -> (name, type) of each annotated attribute that it declares itself."""
    fields: dict[str, list[tuple[str, str]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        fields[node.name] = []
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                annotation = ast.unparse(statement.annotation)
                if "ClassVar" not in annotation:
                    fields[node.name].append((statement.target.id, annotation))
    return fields


def recipe_keys(trees: Iterable[ast.Module], root: str = "RunConfig") -> list[str]:
    """Returns the leaf keys of the recipe, `section.key`, read from its classes and their bases.

    The classes are read from their source; none is imported.
    """
    classes: dict[str, list[tuple[str, str]]] = {}
    bases: dict[str, list[str]] = {}
    for tree in trees:
        classes |= fields_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base) for base in node.bases]

    def leaves(name: str, prefix: str) -> Iterator[str]:
        for base in bases.get(name, []):
            yield from leaves(base, prefix)
        for field, annotation in classes.get(name, []):
            words = re.findall(r"\w+\b(?!\()", annotation)
            sections = [word for word in words if classes.get(word)]
            if sections:
                yield from leaves(sections[0], f"{prefix}{field}.")
            else:
                yield f"{prefix}{field}"

    return list(leaves(root, ""))


def lines_of_tests(texts: Iterable[str]) -> dict[str, int]:
    """Returns the lines of test files: all, of code, in test functions, in files without a test."""
    counts = Counter[str]()
    for text in texts:
        functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]
        tests = [node for node in functions if node.name.startswith("test_")]
        counts["lines"] += text.count("\n")
        counts["code"] += len(code_lines(text))
        counts["inside_tests"] += 0
        for test in tests:
            first = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
            counts["inside_tests"] += (test.end_lineno or 0) - first + 1
        counts["in_files_without_a_test"] += 0 if tests else text.count("\n")
        counts["files"] += 1
        counts["tests"] += len(tests)
    return dict(counts)


def names_of(tree: ast.AST) -> Iterator[str]:
    """Yields the names of all variables that a module sets and of its functions' arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def count_of(tree: ast.AST, kind: Any) -> int:
    """Returns the number of nodes of a kind in a tree, its root included."""
    return sum(isinstance(node, kind) for node in ast.walk(tree))


def sets_a_tuple(node: ast.AST) -> bool:
    """Returns whether a statement has the form `a, b = x, y`."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
    )


def begins_with_a_verb(docstring: str) -> bool:
    """Returns whether the first word is a verb in the indicative, as in "Returns the ...".

    A plural noun has the same form; the word behind it tells.
    """
    first, second, *_ = [*docstring.split(), "", ""]
    first = first.rstrip(",:;")
    is_form_of_verb = VERB.fullmatch(first) and first not in NO_VERBS
    return bool(is_form_of_verb) and second not in BEHIND_A_NOUN


def measure_text(trees: Iterable[ast.Module], code: int) -> dict[str, Any]:
    """Returns measures that a formatter does not move, and the anchors' values.

    Args:
        code: lines of code of all trees together.
    """
    nodes: list[ast.AST] = []
    names: list[str] = []
    for tree in trees:
        nodes += ast.walk(tree)
        names += names_of(tree)
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    functions = [node for node in nodes if isinstance(node, Function)]
    public_functions = [node for node in functions if not node.name.startswith("_")]
    docstrings = list(filter(None, map(ast.get_docstring, public_functions)))
    num_without_verb = sum(not begins_with_a_verb(docstring) for docstring in docstrings)
    sizes = [count_of(node, ast.expr) for node in statements if not isinstance(node, COMPOUND)]
    num_expressions = sum(isinstance(node, ast.expr) for node in nodes)
    num_tuples = sum(map(sets_a_tuple, nodes))
    vague = Counter(name for name in names if name in NO_NOUNS.split())
    density = 1 + num_expressions / len(statements)
    percent_large = 100 * sum(size > 20 for size in sizes) / len(sizes)
    percent_vague = 100 * vague.total() / len(names)
    percent_without_verb = 100 * num_without_verb / max(1, len(docstrings))
    num_closures = sum(count_of(node, Function) - 1 for node in functions)
    return {
        "statements": len(statements),
        "expressions_and_statements_per_statement": round(density, 2),
        "percent_of_simple_statements_with_over_20_expressions": round(percent_large, 2),
        "closures": num_closures,
        "lambdas": sum(isinstance(node, ast.Lambda) for node in nodes),
        "percent_of_names_that_are_no_nouns": round(percent_vague, 2),
        "names_that_are_no_nouns": dict(vague.most_common(12)),
        "tuple_assignments_per_1000_lines": round(1000 * num_tuples / code, 1),
        "percent_of_public_docstrings_without_a_verb": round(percent_without_verb, 1),
        "anchors": ANCHORS,
    }


def measure(root: Path) -> dict[str, Any]:
    """Returns all figures of a checkout."""
    command = ["git", "-C", str(root), "ls-files"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = {name: root / name for name in listing.splitlines()}
    files = [name for name, path in paths.items() if path.is_file() and not path.is_symlink()]
    source: dict[str, str] = {}
    tests: list[str] = []
    num_other_lines = 0
    for name in files:
        is_python = name.endswith(".py")
        if not is_python and not name.endswith(OTHER_SOURCE):
            continue
        text = paths[name].read_text()
        if is_python and name.startswith("tests/"):
            tests.append(text)
        elif is_python:
            source[name] = text
        elif not name.startswith("tests/"):
            num_other_lines += text.count("\n")
    trees: dict[str, ast.Module] = {}
    lengths: list[int] = []
    rooms = Counter[str]()
    num_code = 0
    num_filled = 0
    for name, text in source.items():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = parse(text, name)
        trees[module] = tree
        code = code_lines(text)
        num_code += len(code)
        num_filled += sum(bool(line.strip()) for line in text.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, Function):
                lengths.append(
                    len(code.intersection(range(node.lineno, (node.end_lineno or 0) + 1)))
                )
        folders = name.split("/")[:-1]
        for depth in range(1, min(len(folders), 2) + 1):
            rooms["/".join(folders[:depth])] += text.count("\n")
    num_files_of_field: dict[str, int] = {}
    for module in ("privacy.plan.numbers", "privacy.plan.request"):
        classes = fields_of(trees[module])
        for class_name in ("Choices", "PlanChoices", "PrivacyPlan"):
            for field, _ in classes.get(class_name, []):
                pattern = re.compile(rf"\b{field}\b")
                texts = source.values()
                num_files_of_field[field] = sum(bool(pattern.search(text)) for text in texts)
    fields_by_count = sorted(num_files_of_field.items(), key=lambda pair: -pair[1])
    num_to_touch = 0
    num_words = 0
    for name in files:
        if name.startswith(RECORDS) or not name.endswith((".py", ".j2", ".md")):
            continue
        text = paths[name].read_text()
        num_to_touch += bool(CLIPPING_FUNCTION.search(text))
        if name.endswith(".md") and not name.startswith("tests/"):
            num_words += len(text.split())
    recipe_modules = ("trainer.config", "privacy.")
    recipe_trees = [tree for module, tree in trees.items() if module.startswith(recipe_modules)]
    sizes = {
        "lines": sum(text.count("\n") for text in source.values()),
        "code": num_code,
        "docstrings_and_comments_per_line_of_code": round(num_filled / num_code - 1, 3),
        "templates_scripts_notebooks": num_other_lines,
        "files": len(source),
        "verify.py": source["privacy/verify.py"].count("\n"),
        "functions": len(lengths),
        "median_function_length": statistics.median(lengths),
    }
    median = statistics.median(num_files_of_field.values())
    return {
        "source": sizes,
        "tests": lines_of_tests(tests),
        "text": measure_text(trees.values(), num_code),
        "files_to_touch_for_a_clipping_function": num_to_touch,
        "words_of_pages": num_words,
        "root_files": sum("/" not in name for name in files),
        "recipe_keys": len(recipe_keys(recipe_trees)),
        "source_files_that_name_a_plan_field": {"median": median, **dict(fields_by_count)},
        "import_circle": import_circle(import_graph(trees)),
        "lines_per_room": dict(sorted(rooms.items())),
    }


def main() -> None:
    """Prints the figures of a checkout."""

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
        "--life_cycle", action="store_true", help="also the statements that a training executes"
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
