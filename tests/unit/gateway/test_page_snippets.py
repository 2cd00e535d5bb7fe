"""Commands that the page shows to copy: each is one that its program's own parser takes.

The Python code among them runs in `tests/cluster/test_page_snippets.py`, and the call of curl in
`tests/io/gateway/test_page_snippets.py`.
"""

import ast
import re
import shlex

import pytest

from tests.support.page_snippets import APP, JOB, SHOWN, snippets
from unified.api.builder.torchrun import named_signals
from unified.cli.main import COMMANDS, build
from unified.cli.run import run_parser
from unified_agent.cli import build_parser

SHELL = ("unified ", "unified-agent ", "curl ")


def test_every_text_with_a_copy_button_is_found() -> None:
    num_shown = sum(len(SHOWN.findall(path.read_text())) for path in APP.rglob("*.js"))
    found = snippets()
    assert num_shown >= len(found) > 10, found
    assert {"unified ui", "unified ui --read-only", f"unified status {JOB}", "unified jobs"} <= set(found)
    assert [text for text in found if text.startswith(("DatasetRegistry", "ShardedDataset", "CheckpointManager"))]


@pytest.mark.parametrize("text", [text for text in snippets() if text.startswith(SHELL)])
def test_a_command_is_one_that_its_program_takes(text: str) -> None:
    program, *words = shlex.split(text.replace("HOST:PORT", "127.0.0.1:7077"))
    if program == "unified-agent":
        assert build_parser().parse_args(words).master == "127.0.0.1:7077"
    elif program == "unified" and words[0] == "run":
        arguments = run_parser({}).parse_args(words[1:])
        assert (arguments.training_script, named_signals(arguments.signals_to_handle)) != ("", [])
    elif program == "unified":
        arguments = build(words).parse_args(words)
        assert words[0] in COMMANDS
        assert getattr(arguments, "job", JOB) == JOB
        if "grep" in arguments and arguments.grep:
            assert re.compile(arguments.grep).search("It's (NaN) again"), "as the page finds it: in any case, as a text"
    else:
        assert program == "curl"


def test_all_else_is_an_expression_of_python() -> None:
    code = [text for text in snippets() if not text.startswith(SHELL)]
    assert len(code) >= 3, code
    for text in code:
        ast.parse(text, mode="eval")
