"""What Ctrl-C and SIGTERM do to a driver that has no job to stop in order."""

import signal
import sys
from importlib.machinery import ModuleSpec

import pytest

from unified.cli.main import main
from unified.client.terminal import ending_at_once, handled


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")])
def test_a_signal_ends_what_runs_in_order_and_says_so(
    number: signal.Signals, code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(SystemExit) as end, ending_at_once():
        signal.raise_signal(number)
    assert end.value.code == code
    assert capsys.readouterr().err == f"unified: ended by {name}\n"
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_end_that_no_signal_asked_for_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="3"), ending_at_once():
        sys.exit(3)
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_a_command_is_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            if name == "unified.cli.run":
                raise KeyboardInterrupt
            return None

    monkeypatch.delitem(sys.modules, "unified.cli.run", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    assert main(["run", "train.py"]) == 130
    assert capsys.readouterr().err == "unified: ended by Ctrl-C\n"


def test_a_signal_for_workers_that_comes_before_there_are_any_is_dropped() -> None:
    came: list[int] = []
    with ending_at_once([signal.SIGUSR1]):
        signal.raise_signal(signal.SIGUSR1)
        with handled(came.append, [signal.SIGUSR1]):  # a job is watched by now
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    assert came == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
