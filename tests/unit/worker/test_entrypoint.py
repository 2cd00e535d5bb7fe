"""LoadedEntry points: what is found, how it is called, and what is said when it cannot be."""

import calendar
import json
import json.decoder
import os
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from unified.errors import EntryPointError
from unified.job.spec import EntryPoint
from unified.worker.entrypoint import LoadedEntry, imports_elastic, is_executable, load
from unified.worker.failure import describe

CODE = """
import functools
from unified import rpc
seen = []

def plain():
    seen.append("plain")

def with_config(args):
    seen.append(args)

def with_default(argv=None):
    seen.append(argv)

def too_many(a, b):
    pass

def keyword(*, where):
    pass

async def coroutine(args):
    seen.append(("async", args))

def generator():
    seen.append("never")
    yield

async def async_generator():
    yield

@functools.wraps(generator)
def decorated():
    return generator()

def returns_a_generator():
    seen.append("done")
    return (number for number in [1])

class Generates:
    def run(self):
        yield

bound = functools.partial(with_config, "bound")
number = 3

class Service:
    def __init__(self):
        seen.append("made")

    def run(self):
        seen.append("ran")

class Constructed:
    def __init__(self, args):
        self.args = args

    def run(self):
        seen.append(self.args)

class Configured:
    def run(self, args):
        seen.append(args)

class NoRun:
    pass

class Answers:
    @rpc()
    def answer(self):
        pass

class NeedsArguments:
    def __init__(self, model, *, size):
        pass

    def run(self):
        pass

class Outer:
    class Inner:
        def run(self):
            seen.append("inner")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path with a module `wk_entry`; whatever modules the test imports are forgotten after it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["test"])
    before = dict(sys.modules)
    (tmp_path / "wk_entry.py").write_text(CODE)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]
    sys.modules["__main__"] = before["__main__"]


def attribute(name: str, module: str = "wk_entry", *, is_driver: bool = True) -> LoadedEntry:
    return load(EntryPoint(kind="attribute", target=module, attribute=name), is_driver=is_driver)


def run(entry: LoadedEntry, config: Any = "config") -> list[Any]:
    entry.construct(lambda: config)
    entry.run(lambda: config)
    return list(entry.module.__dict__["seen"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", ["plain"]),
        ("with_config", ["config"]),
        ("with_default", [None]),
        ("coroutine", [("async", "config")]),
        ("bound", ["bound"]),
        ("Service", ["made", "ran"]),
        ("Configured", ["config"]),
        ("Constructed", ["config"]),
        ("Outer.Inner", ["inner"]),
        ("returns_a_generator", ["done"]),
    ],
)
def test_calls_functions_and_classes(module: Path, name: str, expected: list[Any]) -> None:
    assert run(attribute(name)) == expected


def test_config_is_not_decoded_for_those_who_do_not_take_it(module: Path) -> None:
    entry = attribute("plain")

    def config() -> None:
        raise AssertionError("asked for")

    entry.construct(config)
    entry.run(config)
    assert entry.module.__dict__["seen"] == ["plain"]


def test_class_with_rpc_methods_alone_is_a_service(module: Path) -> None:
    assert attribute("Answers").only_serves
    with pytest.raises(EntryPointError, match=r"Answers' has no run\(\) method, and its role trains together.*service"):
        load(EntryPoint(kind="attribute", target="wk_entry", attribute="Answers"), is_driver=True, is_elastic=True)


def test_class_without_run_serves_where_it_is_no_driver(module: Path) -> None:
    entry = attribute("NoRun", is_driver=False)
    entry.construct(lambda: None)
    entry.run(lambda: None)
    assert type(entry.instance).__name__ == "NoRun"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoRun", r"wk_entry\.NoRun' has no run\(\) method and no @rpc methods.*service\(\)"),
        ("NeedsArguments", r"wk_entry\.NeedsArguments' needs the arguments model, size: .*with one, the user's config"),
        ("too_many", r"needs the arguments a, b"),
        ("keyword", r"needs the arguments where"),
        ("generator", r"wk_entry\.generator' is a generator: calling it runs none.*yield"),
        ("async_generator", r"is a generator"),
        ("number", r"is a int: it must be a function or a class"),
        ("plian", r"'wk_entry' has no attribute 'plian'\. Did you mean 'plain'\?.*wk_entry\.py"),
        ("Outer.Iner", r"'wk_entry\.Outer' has no attribute 'Iner'\. Did you mean 'Inner'\?"),
    ],
)
def test_refuses_what_cannot_be_called(module: Path, name: str, message: str) -> None:
    with pytest.raises(EntryPointError, match=message):
        attribute(name)


@pytest.mark.parametrize("name", ["decorated", "Generates"])
def test_generators_that_show_only_when_called_are_refused_then(module: Path, name: str) -> None:
    with pytest.raises(EntryPointError, match=r"is a generator"):
        run(attribute(name))
    assert "never" not in sys.modules["wk_entry"].seen


def test_missing_module_names_the_nearest_and_where_it_looked(module: Path) -> None:
    with pytest.raises(EntryPointError, match=r"no module 'wk_entri'.*Did you mean 'wk_entry'\?") as caught:
        attribute("run", "wk_entri")
    assert str(module) in str(caught.value)
    assert str(Path(os.__file__).parent / "lib-dynload") not in str(caught.value)
    assert "name that folder with working_dir=" in describe(caught.value).summary, "not cut off with the folders"


def test_missing_module_inside_a_package(module: Path) -> None:
    (module / "wk_pack").mkdir()
    (module / "wk_pack" / "__init__.py").touch()
    (module / "wk_pack" / "train.py").touch()
    with pytest.raises(EntryPointError, match=r"no module 'wk_pack\.trian'.*Did you mean 'train'\?"):
        attribute("run", "wk_pack.trian")


def test_a_dependency_that_is_missing_is_named(module: Path) -> None:
    (module / "wk_needs.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(EntryPointError, match=r"'wk_needs' imports 'nowhere_to_be_found'.*python=") as caught:
        attribute("run", "wk_needs")
    failure = describe(caught.value)
    assert (failure.category, failure.exception_type) == ("setup", "ModuleNotFoundError")
    assert "wk_needs.py" in failure.traceback
    assert "unified/worker" not in failure.traceback


def test_syntax_error_shows_file_line_and_place(module: Path) -> None:
    (module / "wk_broken.py").write_text("def run():\n    return (1,\n")
    with pytest.raises(EntryPointError, match=r"wk_broken\.py:2: SyntaxError: '\(' was never closed") as caught:
        attribute("run", "wk_broken")
    failure = describe(caught.value)
    assert failure.category == "setup"
    assert failure.traceback.count("^") == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no licence')", "raised RuntimeError while it was imported: no licence"),
        ("raise SystemExit(2)", "exited with 2 while it was imported.*__main__"),
    ],
)
def test_module_that_raises_at_import(module: Path, code: str, message: str) -> None:
    (module / "wk_raises.py").write_text(code)
    with pytest.raises(EntryPointError, match=message):
        attribute("run", "wk_raises")


def script(path: Path, *argv: str) -> LoadedEntry:
    return load(EntryPoint(kind="script", target=str(path), argv=list(argv)), is_driver=True)


@pytest.mark.parametrize("name", ["wk_script.py", "wk_tool"])
def test_script_runs_as_main_whatever_its_name(module: Path, name: str) -> None:
    path = module / "scripts" / name
    path.parent.mkdir()
    (path.parent / "wk_beside.py").write_text("value = 7\n")
    path.write_text(
        "import pickle, sys, wk_beside\n"
        "class Thing: pass\n"
        "copy = pickle.loads(pickle.dumps(Thing()))\n"
        "seen = [__name__, __file__, sys.argv, sys.path[0], wk_beside.value, type(copy)]\n"
    )
    seen = run(script(path, "--lr", "3"))
    assert seen[:5] == ["__main__", str(path), [str(path), "--lr", "3"], str(path.parent), 7]
    assert seen[5].__module__ == "__main__"


def test_a_link_to_a_script_finds_the_neighbours_of_its_target(module: Path) -> None:
    (module / "real").mkdir()
    (module / "real/wk_neighbour.py").write_text("value = 7\n")
    (module / "real/wk_linked.py").write_text("import sys, wk_neighbour\nseen = [sys.path[0], __file__]\n")
    (module / "wk_link.py").symlink_to("real/wk_linked.py")
    assert run(script(module / "wk_link.py")) == [str(module / "real"), str(module / "wk_link.py")]


def test_modules_beside_a_script_hide_what_was_imported_before(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in (calendar, json, json.decoder):
        monkeypatch.setitem(sys.modules, library.__name__, library)  # back at the end
    (module / "wk/json").mkdir(parents=True)
    (module / "wk/json/__init__.py").write_text("value = 2\n")
    (module / "wk/calendar.py").write_text("value = 1\n")
    for name in ("abc.py", "unified.py"):  # frozen, and the runtime's own
        (module / "wk" / name).write_text("raise SystemExit('not this one')\n")
    (module / "wk/wk_hides.py").write_text(
        "import abc, calendar, json, sys, unified\nseen = [calendar.value, json.value, 'json.decoder' in sys.modules]\n"
    )
    assert run(script(module / "wk/wk_hides.py")) == [1, 2, False]


def test_a_folder_in_front_hides_what_was_imported_before(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "calendar", calendar)
    (module / "calendar.py").write_text("seen = []\ndef run():\n    seen.append(7)\n")
    assert run(attribute("run", "calendar")) == [7]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wk_enty.py", r"cannot be read.*No such file.*Did you mean 'wk_entry\.py'\?"),
        (".", r"is a folder without a __main__\.py"),
    ],
)
def test_script_that_is_none_is_refused(module: Path, name: str, message: str) -> None:
    with pytest.raises(EntryPointError, match=message):
        script(module / name)


def test_script_with_a_syntax_error_is_refused_before_it_runs(module: Path) -> None:
    path = module / "wk_bad.py"
    path.write_text("print('never')\nif True\n    pass\n")
    with pytest.raises(EntryPointError, match=r"wk_bad\.py:2: SyntaxError: expected ':'"):
        script(path)


@pytest.mark.parametrize(
    ("code", "error", "category"),
    [
        ("import nowhere_to_be_found\n", EntryPointError, "setup"),
        ("def work():\n    import nowhere_to_be_found\nwork()\n", ModuleNotFoundError, "user"),
    ],
)
def test_only_an_import_at_the_top_fails_a_scripts_setup(
    module: Path, code: str, error: type[Exception], category: str
) -> None:
    (module / "wk_imports.py").write_text(code)
    with pytest.raises(error, match="No module named 'nowhere_to_be_found'") as caught:
        run(script(module / "wk_imports.py"))
    assert describe(caught.value).category == category


def program(name: str, *argv: str) -> LoadedEntry:
    return load(EntryPoint(kind="module", target=name, argv=list(argv)), is_driver=True)


def test_module_and_package_run_as_main(module: Path) -> None:
    (module / "wk_prog").mkdir()
    (module / "wk_prog" / "__init__.py").touch()
    (module / "wk_prog" / "part.py").write_text("value = 5\n")
    code = "import sys\nfrom . import part\nseen = [__name__, __spec__.name, part.value, sys.argv]\n"
    for file in ("__main__.py", "tool.py"):
        (module / "wk_prog" / file).write_text(code)
    main = str(module / "wk_prog" / "__main__.py")
    assert run(program("wk_prog", "-x")) == ["__main__", "wk_prog.__main__", 5, [main, "-x"]]
    assert run(program("wk_prog.tool"))[:3] == ["__main__", "wk_prog.tool", 5]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from unified.elastic import elastic", True),
        ("def run():\n    import os, unified.elastic as e", True),
        ("from unified.elastic.state import ElasticState", True),
        ("from unified import rpc, elastic", True),
        ("from unified import rpc\nelastic = 1", False),
        ("import os  # unified.elastic\nname = 'unified.elastic'", False),
        ("import unified.elasticity", False),
    ],
)
def test_an_entry_point_imports_elastic_at_its_top_or_later(tmp_path: Path, code: str, expected: bool) -> None:
    found = ModuleType("code")
    found.__file__ = str(tmp_path / "imports.py")
    script = EntryPoint(kind="script", target="imports.py")
    assert not imports_elastic(script, found), "no file"
    Path(found.__file__).write_text(code)
    assert imports_elastic(script, found) is expected


def test_missing_program_module(module: Path) -> None:
    with pytest.raises(EntryPointError, match="no module 'wk_nothing'"):
        program("wk_nothing")
    with pytest.raises(EntryPointError, match="no module 'wk_nothing'"):
        program("wk_nothing.tool")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_folder_or_a_zip_file_with_a_main_runs(module: Path, kind: str) -> None:
    path = module / "wk_app"
    path.mkdir()
    (path / "__main__.py").write_text(
        "import wk_inside_app, sys\nseen = (__name__, wk_inside_app.value, sys.path[0])\n"
    )
    (path / "wk_inside_app.py").write_text("value = 7\n")
    if kind == "zip":
        with zipfile.ZipFile(module / "wk_app.pyz", "w") as file:
            for name in ("__main__.py", "wk_inside_app.py"):
                file.write(path / name, name)
        path = module / "wk_app.pyz"
    entry = script(path)
    try:
        run(entry)
        assert entry.module.seen == ("__main__", 7, str(path))
    finally:
        sys.modules.pop("wk_inside_app", None)


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("#!/bin/sh\necho\n", 0o755, True),
        ("\x7fELF", 0o755, True),
        ("#!/bin/sh\necho\n", 0o644, False),
        ("#!/usr/bin/env python3\n", 0o755, False),
        ("import torch\n", 0o755, False),
    ],
)
def test_programs_that_are_no_python(tmp_path: Path, text: str, mode: int, expected: bool) -> None:
    path = tmp_path / "entry"
    path.write_text(text)
    path.chmod(mode)
    assert is_executable(EntryPoint(kind="script", target=str(path))) == expected
    assert is_executable(EntryPoint(kind="program", target="anything"))
    assert not is_executable(EntryPoint(kind="module", target="anything"))
    assert not is_executable(EntryPoint(kind="script", target=str(tmp_path / "missing")))
