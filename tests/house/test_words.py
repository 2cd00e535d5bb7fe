"""The words of the code: docstrings whose first line has a subject, and no words that CONTRIBUTING.md replaces."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = [ROOT / "unified", ROOT / "agent", ROOT / "gateway", ROOT / "master", ROOT / "simulator"]
BESIDE = [ROOT / "benchmarks", ROOT / "examples", ROOT / "scripts", ROOT / "tests"]
NO_SUBJECT = frozenset(
    """
    As By How If It Its Nor Of So That Their There They This Those To Under What When Where Whether Which Who Whoever
    Whom Whose Why
    """.split()  # noqa: SIM905
)
ORDINARY = frozenset(
    """
    answered course drained encoded filled granted heads holder lives marks places post room sealed site sites taking
    told turn warm way
    """.split()  # noqa: SIM905
)
"""Words of the glossary's third column that ordinary English, or another field, has as well. So text may have them."""
IN_NAMES = ORDINARY - {"lives", "places", "taking", "told"}
"""Those that functions and variables may have, as in `is_drained`, `has_room`, `num_heads`."""
OTHER_SENSES = {
    "_M_ARENA_MAX": "a constant of malloc",
    "arena": "the same",
    "cell": "a part of a row in a table on the terminal, or of a notebook",
    **dict.fromkeys(("early_stopping_patience", "_patience", "patience"), "transformers' word for early stopping"),
    "gate_proj": "a layer of Llama",
    "ticket": "what a browser signs in with, for which this is the usual word",
    "tickets": "the same",
}
"""Names and words in a sense that the glossary does not mean."""
IN_TESTS = OTHER_SENSES | {
    "homes": "home folders of users, and of clusters in a program",
    "staged": "a state dict of which `stage_state` makes a copy",
}
"""Such names of tests, benchmarks and examples."""
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Text; from Python 3.12 on that of an f-string has a kind of its own."""
OF_SIGN_IN = {"gateway/unified_gateway/", "unified/cli/ui.py"}


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        for each in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.value.value


def replaced_words() -> set[str]:
    """Words of the third column of the glossary."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", text.partition("## Glossary")[2], re.MULTILINE)
    return {word for row in rows[1:] for word in row.strip().split(", ")}


def words(name: str) -> set[str]:
    """Words of `a_name` and of `AName`, as singulars and plurals stand there."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def test_docstrings_begin_with_a_subject() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {text.strip().splitlines()[0]}"
        for package in PRODUCT
        for file in sorted(package.rglob("*.py"))
        for text in docstrings(ast.parse(file.read_text()))
        if (first := re.match(r"\W*(\w*)", text)) and first[1] in NO_SUBJECT
    ]
    advice = "begin with a noun phrase that names the thing, or with the verb of a function (CONTRIBUTING.md)"
    assert not found, "\n".join([advice, *found])


def banned_words() -> set[str]:
    banned = replaced_words()
    assert len(banned) > 50, "the glossary of CONTRIBUTING.md was not found"
    return banned


def modules(folders: list[Path] = PRODUCT) -> Iterator[tuple[str, str]]:
    """Path and text of each module."""
    for package in folders:
        for file in sorted(package.rglob("*.py")):
            yield str(file.relative_to(ROOT)), file.read_text()


def is_meant(path: str, name: str) -> bool:
    """Return True unless the word is used in another sense."""
    if "ticket" in name.lower():
        return not path.startswith(tuple(OF_SIGN_IN))
    return name not in OTHER_SENSES


def names_of(tree: ast.AST) -> Iterator[str]:
    """Names of functions, arguments, variables and attributes that a module defines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_names_of_modules_and_classes_are_those_of_the_glossary() -> None:
    banned = banned_words()
    found = [
        f"{path}: {name}"
        for path, text in modules()
        for name in [
            Path(path).stem,
            *(node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)),
        ]
        if words(name) & banned
    ]
    assert not found, f"the glossary of CONTRIBUTING.md has other words for {found}"


def test_names_of_functions_and_variables_are_those_of_the_glossary() -> None:
    banned = banned_words() | {"life", "lives"}
    found = {
        f"{path}: {name}"
        for path, text in modules()
        for name in names_of(ast.parse(text))
        if words(name) & (banned - IN_NAMES) and is_meant(path, name)
    }
    assert not found, f"the glossary of CONTRIBUTING.md has other words for {sorted(found)}"


def test_messages_and_comments_have_the_words_of_the_glossary() -> None:
    banned = banned_words() - ORDINARY | {"life"}
    found = [
        f"{path}:{token.start[0]}: {word}"
        for path, text in modules()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in STRINGS | {tokenize.COMMENT}
        for word in re.findall("[a-z]+", token.string.lower())
        if word in banned and is_meant(path, word)
    ]
    assert not found, f"the glossary of CONTRIBUTING.md has other words: {found}"


def test_names_in_tests_benchmarks_and_examples_are_those_of_the_glossary() -> None:
    banned = banned_words() - ORDINARY - IN_TESTS.keys()
    found = {
        f"{path}: {name}"
        for path, text in modules(BESIDE)
        for tree in [ast.parse(text)]
        for name in [*names_of(tree), *(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
        if words(name) & banned
    }
    assert not found, f"the glossary of CONTRIBUTING.md has other words for {sorted(found)}"


def test_pages_have_the_words_of_the_glossary() -> None:
    banned = banned_words() - ORDINARY - OTHER_SENSES.keys() | {"life"}
    found = [
        f"{page.relative_to(ROOT)}:{number}: {word}"
        for page in [ROOT / "README.md", *ROOT.glob("*/README.md"), *sorted((ROOT / "docs").rglob("*.md"))]
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for word in re.findall("[a-z]+", line.lower())
        if word in banned
    ]
    assert not found, f"the glossary of CONTRIBUTING.md has other words: {found}"
