"""Entry points as users write them, and as workers get them."""

from __future__ import annotations

import keyword
import shlex
import sys
from typing import Any

from unified.errors import EntryPointError, nearest
from unified.job.by_value import is_importable
from unified.job.enums import WorkloadEntrypointType
from unified.job.spec import EntryPoint

_FORMS = (
    "Write 'module.function', 'module::Class', 'path/to/script.py --its arguments', '-m module --its arguments', or "
    "'--no-python program --its arguments'. The path of a script without .py, or of a folder or zip file with a "
    "__main__.py, needs a /: './train'."
)
_LAUNCHERS = ("torchrun", "dlrover-run")
NO_PYTHON = "--no-python"
"""Word before a program that is run without Python, like torchrun's option."""


def get_entrypoint_type(entry_point: str) -> WorkloadEntrypointType | None:
    """Return the form of an entry point, or None if it has none of them. Nothing is imported or opened."""
    try:
        parsed = parse(entry_point)
    except EntryPointError:
        return None
    return {
        "attribute": WorkloadEntrypointType.MODULE_FUNC,
        "script": WorkloadEntrypointType.PY_CMD,
        "module": WorkloadEntrypointType.MODULE_CMD,
        "program": WorkloadEntrypointType.PROGRAM_CMD,
    }[parsed.kind]


def parse(entry_point: str) -> EntryPoint:
    """Read an entry point. Quotes in arguments work as in a shell; nothing is imported or opened.

    EntryPointError: it has no known form; the message lists the forms.
    """
    text = entry_point.strip()
    if _is_dotted(dotted := text.replace("::", ".")):
        module, _, attribute = text.partition("::") if "::" in text else dotted.rpartition(".")
        return EntryPoint(kind="attribute", target=module, attribute=attribute.replace("::", "."))
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise EntryPointError(f"entry point {text!r}: {error}. Close each quote.") from None
    if len(words) > 1 and words[0] == NO_PYTHON:
        return EntryPoint(kind="program", target=words[1], argv=words[2:])
    if words and (words[0].endswith(".py") or ("/" in words[0] and not _is_program(words[0]))):
        return EntryPoint(kind="script", target=words[0], argv=words[1:])
    if len(words) > 1 and words[0] == "-m" and all(map(_is_name, words[1].split("."))):
        return EntryPoint(kind="module", target=words[1], argv=words[2:])
    raise EntryPointError(f"entry point {text!r} is not valid{_why(words)}. {_FORMS}")


def normalized(entry_point: Any) -> Any:
    """Return an entry point, a text or an object, as a text that `parse` can read, without outer blanks, and with
    ``module.attr`` for ``module::attr``.

    A function or class that workers cannot import by name is returned as it is: from ``__main__``, from a notebook's
    cell, from a file that was loaded by its path, or a closure. Other callable objects are returned as they are, too.

    EntryPointError: it is neither a text of a known form nor callable.
    """
    if not isinstance(entry_point, str):
        return _name_or_itself(entry_point)
    parsed = parse(entry_point)
    if parsed.kind != "attribute":
        return entry_point.strip()
    if parsed.target == "__main__":
        return _of_main(parsed.attribute)
    return f"{parsed.target}{'::' if '.' in parsed.attribute else '.'}{parsed.attribute}"


def name_of(value: Any) -> tuple[str, str]:
    """Return the module and the name of a function or class, for people; of another object its type's name."""
    named = value if hasattr(value, "__qualname__") else type(value)
    return str(getattr(value, "__module__", None) or "__main__"), str(named.__qualname__)


def _name_or_itself(value: Any) -> Any:
    if not callable(value):
        raise EntryPointError(
            f"entry point {value!r} is of type {type(value).__name__}: give a function or a class. {_FORMS}"
        )
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or not is_importable(module):
        return value
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return normalized(f"{module}::{name}") if found is value else value


def _of_main(name: str) -> Any:
    """Return the object that ``__main__.run`` names: it is looked up here, because workers are other programs."""
    found: Any = sys.modules["__main__"]
    for part in name.split("."):
        if not hasattr(found, part):
            raise EntryPointError(
                f"entry point '__main__.{name}': the program that describes this job has no {part!r}."
                f"{nearest(part, dir(found))} Give the function or class itself, or the name of its module."
            )
        found = getattr(found, part)
    return _name_or_itself(found)


def _is_name(word: str) -> bool:
    return word.isidentifier() and not keyword.iskeyword(word)


def _is_dotted(text: str) -> bool:
    """Return True for `module.attr`; but `train.py` is a file, not the attribute `py` of a module `train`."""
    names = text.split(".")
    return len(names) > 1 and names[-1] != "py" and all(map(_is_name, names))


def _is_program(path: str) -> bool:
    """Return True if the path looks like an interpreter or a launcher, which no entry point may name."""
    name = path.rsplit("/", 1)[-1]
    return name.startswith("python") or name in _LAUNCHERS


def _why(words: list[str]) -> str:
    if not words:
        return ": it is empty"
    first = words[0].rsplit("/", 1)[-1]
    if first.startswith("python"):
        return ": leave the interpreter out (`python=` of submit chooses it)"
    if first in _LAUNCHERS:
        return ": a launcher's command line goes to by_dlrover_run_cmd()"
    if len(words) == 1 and _is_name(words[0]):
        return ": it names no module"
    return ""
