"""Entry points: which texts have a form, and what they say."""

import functools
import shlex
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from unified.errors import EntryPointError, UsageError
from unified.job import WorkloadEntrypointType, get_entrypoint_type
from unified.job.entrypoint import normalized, parse
from unified.job.payload import decode, encode_code
from unified.job.spec import EntryPoint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pkg.mod.run", EntryPoint(kind="attribute", target="pkg.mod", attribute="run")),
        ("mod.run", EntryPoint(kind="attribute", target="mod", attribute="run")),
        ("  pkg.mod::Service ", EntryPoint(kind="attribute", target="pkg.mod", attribute="Service")),
        ("train.py", EntryPoint(kind="script", target="train.py")),
        ("a.b.py", EntryPoint(kind="script", target="a.b.py")),
        ("/abs/train.py --lr 1", EntryPoint(kind="script", target="/abs/train.py", argv=["--lr", "1"])),
        (
            """./train.py --name 'two words' --json '{"a": 1}' --empty ''""",
            EntryPoint(
                kind="script", target="./train.py", argv=["--name", "two words", "--json", '{"a": 1}', "--empty", ""]
            ),
        ),
        ("'my dir/train.py' x", EntryPoint(kind="script", target="my dir/train.py", argv=["x"])),
        ("pkg.mod::Outer.Inner", EntryPoint(kind="attribute", target="pkg.mod", attribute="Outer.Inner")),
        ("-m pkg.train --x 'a b'", EntryPoint(kind="module", target="pkg.train", argv=["--x", "a b"])),
        ("-m train", EntryPoint(kind="module", target="train")),
        ("--no-python bash run.sh 'a b'", EntryPoint(kind="program", target="bash", argv=["run.sh", "a b"])),
    ],
)
def test_entry_points_are_read(text: str, expected: EntryPoint) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("  ", "it is empty"),
        ("run", "it names no module"),
        ("python train.py", "leave the interpreter out"),
        ("/usr/bin/python3.12 train.py", "leave the interpreter out"),
        ("torchrun train.py", "by_dlrover_run_cmd"),
        ("train", "names no module"),
        ("/usr/bin/python3 train.py", "leave the interpreter out"),
        ("bin/torchrun train.py", "by_dlrover_run_cmd"),
        ("mod.class", "is not valid"),
        ("mod.1run", "is not valid"),
        ("pkg..run", "is not valid"),
        ("train.py 'open", "quote"),
        ("-m", "is not valid"),
        ("-m not-a-module", "is not valid"),
        ("--no-python", "is not valid"),
        ("mod:run", "is not valid"),
    ],
)
def test_what_has_no_form_is_refused_with_a_reason(text: str, said: str) -> None:
    with pytest.raises(EntryPointError, match=said):
        parse(text)
    assert get_entrypoint_type(text) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a.b", WorkloadEntrypointType.MODULE_FUNC),
        ("a::b", WorkloadEntrypointType.MODULE_FUNC),
        ("a.py --b", WorkloadEntrypointType.PY_CMD),
        ("-m a.b", WorkloadEntrypointType.MODULE_CMD),
        ("--no-python a.b", WorkloadEntrypointType.PROGRAM_CMD),
    ],
)
def test_types_of_entry_points(text: str, kind: WorkloadEntrypointType) -> None:
    assert get_entrypoint_type(text) is kind


def test_normal_form_has_dots_and_keeps_arguments_as_written() -> None:
    assert normalized(" test::main ") == "test.main"
    assert normalized(" t.py --a 'b::c d' ") == "t.py --a 'b::c d'"


class Outer:
    class Inner:
        pass

    def method(self) -> None:
        pass


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A `__main__` with what cells would have put there."""
    module = ModuleType("__main__")
    exec("def run():\n    return helper()\ndef helper():\n    return 7\nnumber = 3", vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_objects_that_workers_can_import_go_by_name() -> None:
    assert normalized(shlex.join) == "shlex.join"
    assert normalized(threading.Thread.start) == "threading::Thread.start"


def test_other_objects_stay_what_they_are(notebook: ModuleType) -> None:
    for value in (lambda: 0, Outer().method, functools.partial(shlex.join, []), notebook.run):
        assert normalized(value) is value
    assert normalized("__main__.run") is notebook.run
    assert normalized(" __main__::run ") is notebook.run


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("__main__.rum", "the program that describes this job has no 'rum'. Did you mean 'run'?"),
        ("__main__.number", "entry point 3 is of type int: give a function or a class"),
        (5, "entry point 5 is of type int: give a function or a class"),
        (None, "is of type NoneType"),
    ],
)
def test_what_cannot_be_called_is_refused(notebook: ModuleType, given: Any, said: str) -> None:
    with pytest.raises(EntryPointError) as error:
        normalized(given)
    assert said in str(error.value)


def test_code_of_a_file_that_nobody_can_import_travels_with_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("file_of_a_driver")  # as `unified submit FILE.py` loads it
    code = "from unified import rpc\ndef run():\n    return helper()\ndef helper():\n    return 7\n@rpc\ndef ask(): ..."
    exec(code, vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert normalized(module.run) is module.run
    blob = encode_code(module.run, "entry point")
    monkeypatch.delitem(sys.modules, module.__name__)
    run, functions = decode(blob)
    assert run() == 7
    assert [each.__name__ for each in functions] == ["ask"]


def test_what_cannot_be_sent_is_said_with_the_remedy() -> None:
    lock = threading.Lock()
    with pytest.raises(
        UsageError, match=r"the entry point of role a cannot be sent.*lock.*in a module that workers can"
    ):
        encode_code(lambda: lock, "entry point of role a")
