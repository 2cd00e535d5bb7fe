"""The command line of `unified`: what each command is told, and what is loaded for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from unified.cli.main import COMMANDS, Command, main


@pytest.mark.parametrize("line", ["--help", "status --help", "status x --master tcp://127.0.0.1:9"])
def test_looking_at_a_job_does_not_load_what_describes_one(line: str) -> None:
    script = (
        "import sys\nfrom unified.cli.main import main\n"
        f"main({line.split()!r})\nprint({{'pydantic', 'typer', 'rich', 'omegaconf'}} & set(sys.modules))"
    )
    env = {**os.environ, "UNIFIED_CONNECT_S": "0.01"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_every_command_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for name in COMMANDS if name not in ("run", "key")]
    for words in [*([name] for name in names), ["key", "new"], ["key", "show"]]:
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"usage: unified {' '.join(words)}")
        assert "show this help" in said


def test_without_a_word_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "explain" in capsys.readouterr().out
    assert main(["key"]) == 2


@pytest.mark.parametrize(("line", "meant"), [("runn x.py", "run"), ("key shw", "show"), ("logs x --folow", "--follow")])
def test_a_wrong_word_is_told_the_nearest(line: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert f"Did you mean {meant!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["logs x --tail=-1", "logs x --rank a", "explain x --limit 0", "stop x --timeout -1"])
def test_a_number_that_makes_no_sense_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert f"unified {line.split()[0]}: argument --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("logs --stream err x --tail 3 trainer-0 -f", "worker", "trainer-0"),
        ("call x actor --timeout 5 add 1 --master tcp://a:1 -2", "arguments", ["1", "-2"]),
        ("explain x --limit 3 trainer-0", "worker", "trainer-0"),
    ],
)
def test_options_may_stand_anywhere(monkeypatch: pytest.MonkeyPatch, line: str, name: str, value: object) -> None:
    words = line.split()
    told: dict[str, object] = {}
    command = COMMANDS[words[0]]
    assert isinstance(command, Command)
    monkeypatch.setattr(f"unified.cli.{command.module}.{words[0]}", lambda **arguments: told.update(arguments))
    assert main(words) == 0
    assert told[name] == value
