"""The words of the code: docstrings whose first line has a subject, and no names that CONTRIBUTING.md replaces."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = [ROOT / "unified", ROOT / "agent", ROOT / "gateway", ROOT / "master", ROOT / "unified_simulator"]
NO_SUBJECT = frozenset(
    """
    As By How If It Its Nor Of So That Their There They This Those To Under What When Where Whether Which Who Whoever
    Whom Whose Why
    """.split()  # noqa: SIM905
)
OLD_NAMES: set[str] = set()
"""Modules and classes that are still to be renamed. Entries may go, never come."""


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


def test_names_are_those_of_the_glossary() -> None:
    banned = replaced_words()
    assert len(banned) > 50, "the glossary of CONTRIBUTING.md was not found"
    names = {
        name
        for package in PRODUCT
        for file in package.rglob("*.py")
        for name in [
            file.stem,
            *(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)),
        ]
    }
    found = {name for name in names if words(name) & banned}
    new, gone = sorted(found - OLD_NAMES), sorted(OLD_NAMES - found)
    assert not new, f"the glossary of CONTRIBUTING.md has other words for {new}"
    assert not gone, f"take out of OLD_NAMES, for they are gone: {gone}"
