"""Entry points: which texts have a form, and what they say."""

import pytest

from unified.errors import EntryPointError
from unified.job import WorkloadEntrypointType, get_entrypoint_type
from unified.job.entrypoint import normalized, parse
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
        ("-m pkg.train --x 'a b'", EntryPoint(kind="module", target="pkg.train", argv=["--x", "a b"])),
        ("-m train", EntryPoint(kind="module", target="train")),
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
    ],
)
def test_types_of_entry_points(text: str, kind: WorkloadEntrypointType) -> None:
    assert get_entrypoint_type(text) is kind


def test_normal_form_has_dots_and_keeps_arguments_as_written() -> None:
    assert normalized(" test::main ") == "test.main"
    assert normalized(" t.py --a 'b::c d' ") == "t.py --a 'b::c d'"
