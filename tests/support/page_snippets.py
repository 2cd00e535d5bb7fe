"""Every command and piece of code that the page shows for people to copy, read from its scripts."""

from __future__ import annotations

import re
from pathlib import Path

APP = Path(__file__).parents[2] / "gateway/unified_gateway/static/app"
JOB = "gpt-1-0123456789"
SHOWN = re.compile(r"(?:\bcommand=|<\$\{Command\} text=)")
"""Attributes of the parts that have a copy button: `Command`, and `Empty`, which passes its `command` on."""
PASSED_ON = "{command}"
_LITERAL = re.compile(r'"([^"\n]*)"|\'([^\'\n]*)\'|`([^`]*)`')
_IN_TEXT = re.compile(r"<code>([^<$]+)</code>|(unified(?:-agent)? [^\"'`<]+)")
_HOLE = re.compile(r"\$\{([^}]*)\}")
_VALUES = {"job.job_id": JOB, "jobId": JOB, "grepPattern(find)": r"'(?i)it'\''s \(nan'"}
"""Values of the holes in these texts. `texts.test.js` holds that `grepPattern` makes this pattern of ``it's (nan``."""


def snippets() -> dict[str, str]:
    """Return each snippet with the name of its file. KeyError: a hole that this module has no value for."""
    found: dict[str, str] = {}
    for path in sorted(APP.rglob("*.js")):
        text = re.sub(r"^\s*(//|/\*\*|\*).*$", "", path.read_text(), flags=re.MULTILINE)
        copied = [each for match in SHOWN.finditer(text) for each in _literals(text[match.end() :])]
        named = [next(filter(None, each)) for each in _IN_TEXT.findall(text)]
        for snippet in (*copied, *named):
            found[_HOLE.sub(lambda hole: _VALUES[hole[1]], snippet).strip()] = path.name
    return found


def _literals(text: str) -> list[str]:
    """Return the texts of an attribute: its own, or each that its expression may give."""
    if text.startswith('"'):
        return [text[1 : text.index('"', 1)]]
    expression = _braced(text.removeprefix("$"))
    found = [next(filter(None, each), "") for each in _LITERAL.findall(expression)]
    assert any(found) or expression == PASSED_ON, f"no text is found in {expression}"
    return [each for each in found if each]


def _braced(text: str) -> str:
    depth = 0
    for at, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if not depth:
            return text[: at + 1]
    raise AssertionError(f"braces are not closed: {text[:80]}")
