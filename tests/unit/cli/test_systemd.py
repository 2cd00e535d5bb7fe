"""`unified systemd install`: what is written where, what is left alone, and what is refused."""

import os
from pathlib import Path

import pytest

from unified.cli import systemd as command
from unified.cli.main import main
from unified.cli.systemd import PROGRAMS, ROLES, render


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of root's whose files are in a folder of the test's, with the programs in it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for role in ROLES:
        (programs / f"unified-{role}").write_text("")
        (programs / f"unified-{role}").chmod(0o755)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(programs))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(command, "_program_paths", lambda programs: [])
    monkeypatch.setattr(command, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_a_unit_that_starts_its_program(
    role: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["systemd", "install", "--role", role, *(["--master", "tcp://h:7077"] if role != "master" else [])]) == 0
    )
    unit = (root / f"etc/systemd/system/unified-{role}.service").read_text()
    assert f"\nExecStart={root}/bin/unified-{role} " in unit
    assert "\nType=notify\n" in unit
    assert "\nRestartPreventExitStatus=2 78\n" in unit
    said = capsys.readouterr().out
    assert f"wrote {root}/etc/systemd/system/unified-{role}.service" in said
    assert f"systemctl enable --now unified-{role}" in said
    assert f"{root}/etc/unified/cluster.key" in said, "there is no key yet"
    assert oct((root / f"etc/unified/{role}.env").stat().st_mode) == "0o100600", "it may have a token"


def test_a_second_time_changes_nothing_and_settings_are_the_operators(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["systemd", "install", "--role", "agent"]
    assert main([*words, "--master", "tcp://h:7077"]) == 0
    settings = root / "etc/unified/agent.env"
    settings.write_text(settings.read_text() + "UNIFIED_LEASE_S=30\n")
    capsys.readouterr()
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"unchanged {root}/etc/systemd/system/unified-agent.service" in said
    assert f"kept {settings}" in said
    assert "systemctl restart unified-agent " in said, "one that runs has what was there before"
    assert "enable --now" not in said
    assert main([*words, "--master", "other:7078"]) == 0
    assert f"changed {settings}" in capsys.readouterr().out
    assert settings.read_text().splitlines()[2:] == [
        "UNIFIED_MASTER=tcp://other:7078",
        '#UNIFIED_AGENT_FLAGS="--labels zone=a"',
        "UNIFIED_LEASE_S=30",
    ]
    assert not list(root.rglob(".*.env.*")), "no part of a file is left"


def test_a_user_has_an_agent_of_their_own(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(root / "config"))
    assert main(["systemd", "install", "--role", "agent", "--user", "--master", "h:7077"]) == 0
    unit = (root / "config/systemd/user/unified-agent.service").read_text()
    assert "User=" not in unit
    assert "WantedBy=default.target" in unit
    assert "UNIFIED_MASTER=tcp://h:7077\n" in (root / "config/unified/agent.env").read_text()
    assert "systemctl --user enable --now unified-agent" in capsys.readouterr().out


def test_print_writes_nothing_and_needs_no_root(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["systemd", "install", "--role", "master", "--print"]) == 0
    said = capsys.readouterr().out
    for file in render("master", root / "bin"):
        assert file.text in said
    assert not (root / "etc").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--role", "agent"], "no master: give --master tcp://HOST:PORT"),
        (["--role", "agent", "--master", "h:port"], "--master 'h:port' is not an address"),
        (["--role", "master", "--master", "h:7077"], "a master listens where --bind says"),
        (["--role", "master", "--user"], "--user is for agents"),
        (["--role", "worker"], "invalid choice: 'worker'"),
        ([], "--role"),
    ],
)
def test_what_is_refused(words: list[str], why: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systemd", "install", *words]) == 2
    assert why in capsys.readouterr().err
    assert not (root / "etc").exists()


def test_units_of_the_system_need_root(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["systemd", "install", "--role", "master"]) == 2
    assert "are written by root: `sudo " in capsys.readouterr().err
    assert not (root / "etc").exists()


def test_a_missing_program_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "bin/unified-gateway").unlink()
    assert main(["systemd", "install", "--role", "gateway"]) == 2
    assert f"no program {root}/bin/unified-gateway" in capsys.readouterr().err


def test_programs_that_the_daemons_cannot_reach_are_refused(tmp_path: Path) -> None:
    (tmp_path / "closed/bin").mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match=r"the daemons run as user unified, which cannot enter .*: install"):
        command._check_reach([tmp_path / "closed/bin"])


def test_programs_below_a_home_open_homes_for_reading() -> None:
    unit = render("master", Path("/home/ann/venv/bin"), is_below_home=True)[0].text
    assert "\nProtectHome=read-only\n" in unit
    assert "\nExecStart=/home/ann/venv/bin/unified-master " in unit
    assert "\nProtectHome=yes\n" in render("master")[0].text


def test_the_files_of_deploy_are_what_is_written_by_default() -> None:
    """Each of them, so that none lies there that nobody writes."""
    files = [*(file for role in ROLES for file in render(role)), *render("agent", is_user=True)]
    folder = Path(__file__).parents[3] / "deploy/systemd"
    assert {file.text for file in files} == {path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert all(str(PROGRAMS) in file.text for file in files if file.path.suffix == ".service")


def test_master_and_gateway_have_one_sandbox() -> None:
    master, gateway = (
        render(role)[0].text.partition("\nNoNewPrivileges=")[2].partition("[Install]")[0]
        for role in ("master", "gateway")
    )
    assert master == gateway
    assert "SystemCallFilter=@system-service" in master
