"""Reads signatures and docstrings from source text, so that pages come out the same on every Python."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple, get_args, get_origin

SECTIONS = {"Args", "Arguments", "Attributes", "Raises", "Returns", "Yields"}
ITEM = re.compile(r"(?P<name>\*{0,2}[\w., ]+): +(?P<text>.+)")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Field(NamedTuple):
    """One annotated name of a class body, with the string below it."""

    name: str
    type: str
    default: str
    text: str


def definition(thing: object) -> ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The syntax tree of a class or function; None for anything else."""
    module, name = inspect.getmodule(thing), getattr(thing, "__qualname__", "")
    if module is None or module.__file__ is None or not module.__name__.startswith("unified"):
        return None  # an alias, such as Literal[…], says that it is typing's
    for node in reversed(ast.parse(Path(module.__file__).read_text()).body):  # after its overloads
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
    return None


def class_of(thing: type) -> ast.ClassDef:
    """The syntax tree of a class that is written in a file."""
    node = definition(thing)
    if not isinstance(node, ast.ClassDef):
        raise TypeError(f"the source of {thing!r} was not found.")
    return node


def alias(thing: object) -> str:
    """The classes behind a type alias: ``ElasticWorkloadDesc | SimpleWorkloadDesc``."""
    if get_origin(thing) is Annotated:
        return alias(get_args(thing)[0])
    parts = get_args(thing)
    return " | ".join(map(alias, parts)) if parts else getattr(thing, "__name__", repr(thing))


def fields(node: ast.ClassDef) -> Iterator[Field]:
    """Public annotated names, and the members of an enum, with the strings that follow them."""
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        text = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            text = inspect.cleandoc(after.value.value)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name, kind, value = statement.target.id, ast.unparse(statement.annotation), statement.value
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, kind, value = statement.targets[0].id, "", statement.value
        else:
            continue
        if not name.startswith("_") and "ClassVar" not in kind and name != "model_config":
            yield Field(name, kind, default_of(value), text)


def default_of(value: ast.expr | None) -> str:
    """A default as a reader wants it: `Field(default=2, ge=0)` is 2; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
        given = {word.arg: word.value for word in value.keywords}
        if "default_factory" in given:
            return {"dict": "{}", "list": "[]"}.get(factory := ast.unparse(given["default_factory"]), f"{factory}()")
        return ast.unparse(given["default"]) if "default" in given else ""
    return ast.unparse(value)


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Public methods and properties with a docstring, less setters, and the overloads and validators of tools."""
    for statement in node.body:
        if not isinstance(statement, DEFINITIONS) or statement.name.startswith("_"):
            continue
        if not decorators(statement) & {"overload", "setter", "field_validator", "model_validator", "field_serializer"}:
            yield statement


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(word).split("(")[0].split(".")[-1] for word in node.decorator_list}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """``name(parameters) -> result``; a property is its name and type."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if "property" in decorators(node) or "cached_property" in decorators(node):
        return f"{node.name}{result.replace(' ->', ':')}"
    parameters = re.sub(r"^(self|cls)(, )?", "", ast.unparse(node.args))
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{node.name}({re.sub(r'^/, ', '', parameters)}){result}"


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ModuleType) -> str:
    """The docstring as Markdown, or an empty string."""
    text = inspect.getdoc(node) if isinstance(node, ModuleType) else ast.get_docstring(node)
    return to_markdown(text or "")


def to_markdown(text: str) -> str:
    """Sections (`Args:` and so on) become lists, double backticks single ones, indented code a block."""
    lines: list[str] = []
    paragraphs = re.split(r"\n(?=\S)", text.replace("``", "`"))
    for paragraph in paragraphs:
        head, _, rest = paragraph.partition("\n")
        if head.rstrip(":") in SECTIONS and head.endswith(":"):
            lines += ["", f"*{head.rstrip(':')}*", "", *_items(textwrap.dedent(rest)), ""]
        elif head.endswith(":") and rest.startswith("    "):  # code has an empty line above it
            lines += [head, "", *_items(textwrap.dedent(rest)), ""]
        elif head.endswith("::") or (rest.strip() and rest.lstrip("\n").startswith("    ")):
            code = textwrap.dedent(rest).strip("\n")
            language = "sh" if code.startswith("python ") else "python"
            lines += [head.replace("::", ":"), "", f"```{language}", *code.split("\n"), "```"]
        else:
            lines += paragraph.split("\n")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _items(text: str) -> list[str]:
    items: list[str] = []
    for line in text.strip().split("\n"):
        found = ITEM.match(line)
        if found and not line.startswith(" "):
            items.append(f"- `{found['name']}`: {found['text']}")
        elif line.strip():
            items.append(f"  {line.strip()}" if items else f"- {line.strip()}")
    return items
