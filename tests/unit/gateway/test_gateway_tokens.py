"""Tokens of the gateway's clients: where they come from, and whom they let in."""

from pathlib import Path

import pytest

from unified.errors import UsageError
from unified_gateway.tokens import ANYONE, Tokens

SECRET = "trainer-demo-token"


def token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_token_has_its_client_and_any_other_has_none(tmp_path: Path) -> None:
    path = token_file(tmp_path, "# of the platform team\nci: ci-token-1\n\nbob:bobs-token\n")
    tokens = Tokens.load(path, {"TRAINER_API_TOKEN": f" {SECRET}\n"})
    shown = ["ci-token-1", "bobs-token", SECRET, "", None, "ci-token-", "\xe9t\xe9"]
    assert [tokens.client_of(each) for each in shown] == ["ci", "bob", "default", None, None, None, None]
    assert tokens.are_needed


def test_the_environment_names_the_file(tmp_path: Path) -> None:
    path = token_file(tmp_path, "ci: ci-token-1")
    assert Tokens.load(None, {"TRAINER_API_TOKEN_FILE": str(path)}).client_of("ci-token-1") == "ci"


def test_the_token_of_the_environment_is_called_by_its_variable() -> None:
    with pytest.raises(UsageError, match="the token in TRAINER_API_TOKEN cannot be used: a token has 8 characters"):
        Tokens.load(None, {"TRAINER_API_TOKEN": "short"})


def test_without_tokens_everybody_is_served_on_loopback_alone() -> None:
    tokens = Tokens.load(None, {})
    assert (tokens.are_needed, tokens.client_of(None)) == (False, ANYONE)
    for host in ("127.0.0.1", "localhost", "::1"):
        tokens.check_listening("unified-gateway", host)
    for host in ("0.0.0.0", "10.0.0.4", "gateway.example", "::"):
        with pytest.raises(UsageError, match="TRAINER_API_TOKEN"):
            tokens.check_listening("unified-gateway", host)
    Tokens({"ci": SECRET}).check_listening("unified-gateway", "0.0.0.0")


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("ci ci-token-1", 0o600, "line 1, is no token"),
        ("ci: a b", 0o600, "line 1, is no token"),
        ("ok: ok-token-1\nci: ci-token-1\nci: ci-token-2", 0o600, "line 3: there is a token 'ci' already"),
        ("ci: ci-token-1\nbob: ci-token-1", 0o600, "two names have the same token"),
        ("ci: short", 0o600, "the token named 'ci' cannot be used: a token has 8 characters or more"),
        ("ci: ci-token-1", 0o604, "can be read by everybody"),
        ("default: ci-token-1", 0o600, "names a token 'default'"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    with pytest.raises(UsageError, match=why) as found:
        Tokens.load(token_file(tmp_path, text, mode), {"TRAINER_API_TOKEN": SECRET})
    assert "ci-token" not in str(found.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        Tokens.load(tmp_path / "none", {})
