"""torchrun's `--log-dir`, `--redirects`, `--tee` and `--local-ranks-filter`, as torch itself reads them."""

import os
import re
from pathlib import Path
from typing import Literal

import pytest

from unified.api.builder import launcher
from unified.api.builder.builder import DLJobBuilder
from unified.client.embedded import EmbeddedCluster
from unified.client.submission import submit_job, with_own_folder
from unified.errors import ClusterError, UsageError
from unified.job.options import submit_options
from unified.job.spec import OutputFiles, RoleSpec
from unified.job.to_spec import to_spec

NPROC = 3


def role_of(builder: DLJobBuilder) -> RoleSpec:
    (role,) = to_spec(submit_options(builder.build(), {"job_name": "j"}, {})).roles
    return role


def role_by_command(cmd: str) -> RoleSpec:
    return role_of(DLJobBuilder().by_dlrover_run_cmd(cmd))


def described(line: str) -> OutputFiles:
    found = role_by_command(f"torchrun {line} --nproc-per-node={NPROC} train.py").output_files
    return found or OutputFiles()


@pytest.mark.parametrize("ranks", ["", "1", "0,2"])
@pytest.mark.parametrize("tee", ["0", "1", "3", "1:2", "0:3,1:1"])
@pytest.mark.parametrize("redirects", ["0", "1", "2", "3", "0:1,1:2", "2:3"])
def test_what_is_written_and_shown_is_what_torch_writes_and_shows(
    tmp_path: Path, redirects: str, tee: str, ranks: str
) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    chosen = {int(rank) for rank in ranks.split(",")} if ranks else None
    torch_s = DefaultLogsSpecs(str(tmp_path), Std.from_str(redirects), Std.from_str(tee), chosen)
    theirs = torch_s.reify({rank: {"TORCHELASTIC_RUN_ID": "none"} for rank in range(NPROC)})
    filtered = f"--local-ranks-filter={ranks}" if ranks else ""
    ours = described(f"--log-dir={tmp_path} --redirects={redirects} --tee={tee} {filtered}")
    places: list[tuple[Literal["out", "err"], dict[int, str], dict[int, str]]] = [
        ("out", theirs.stdouts, theirs.tee_stdouts),
        ("err", theirs.stderrs, theirs.tee_stderrs),
    ]
    for stream, files, tees in places:
        for rank in range(NPROC):
            path = ours.file(stream, rank=rank, local_rank=rank, attempt=0)
            if (redirects, tee) != ("0", "0"):  # the folder alone: torch writes nothing there but its error files
                assert bool(path) == files[rank].endswith(".log")
            assert ours.is_shown(stream, rank) == (files[rank] == "" or rank in tees)


def test_files_are_named_as_torch_names_them() -> None:
    files = described("--log-dir=/logs --rdzv-id=run7 --tee=3 --role=worker")
    assert files.file("out", rank=5, local_rank=1, attempt=2) == "/logs/run7/attempt_2/5/stdout.log"
    assert files.file("err", rank=5, local_rank=1, attempt=2) == "/logs/run7/attempt_2/5/stderr.log"
    assert (files.label, described("--log-dir=/logs").run_id) == ("worker", "none")


def test_the_template_of_the_environment_is_put_in_front_of_lines_of_tee(monkeypatch: pytest.MonkeyPatch) -> None:
    assert described("--tee=3").line_prefix == "[${role_name}${local_rank}]:"
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<$rank>")
    assert described("--tee=3").line_prefix == "<$rank>"
    assert described("--tee=3 --log-line-prefix-template='$hostname '").line_prefix == "$hostname "


def test_logs_specs_that_no_package_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "torchrun: --logs-specs=DOESNOT_EXIST: no package that is installed here has this entry point in the group "
        "torchrun.logs_specs. Leave the option out: it would have no effect."
    )
    with pytest.raises(UsageError, match=re.escape(message)):
        role_by_command("torchrun --logs-specs=DOESNOT_EXIST train.py")
    monkeypatch.setattr(launcher, "entry_points", lambda **chosen: [chosen])
    assert role_by_command("torchrun --logs-specs=of_a_package train.py").total == 1


def test_a_folder_alone_gets_everything_and_everything_is_shown() -> None:
    files = described("--log-dir=logs")
    assert files.log_dir == os.path.abspath("logs")
    assert files.file("err", rank=0, local_rank=0, attempt=0)
    assert files.is_shown("out", 0)


def test_the_null_device_gets_nothing_and_hides_nothing() -> None:
    assert described("--log-dir=/dev/null --redirects=3") == OutputFiles()


def test_a_command_line_in_a_job_means_the_same() -> None:
    builder = DLJobBuilder().by_dlrover_run_cmd("torchrun --nproc-per-node=2 --redirects=1 --tee 0:2 train.py")
    files = role_of(builder).output_files
    assert files is not None
    assert (files.redirects, files.tee, files.label) == ({0: 1, 1: 1}, {0: 2}, "default")


@pytest.mark.parametrize("line", ["--redirects=4", "--tee=0:1,1", "--local-ranks-filter=a", "-r x"])
def test_what_torch_refuses_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="--"):
        described(line)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        described(f"--log-dir={tmp_path}/file")


def test_no_run_writes_over_the_files_of_another(tmp_path: Path) -> None:
    def folder(log_dir: str) -> str:
        files = with_own_folder(role_by_command(f"torchrun {log_dir} --tee=3 train.py")).output_files
        assert files is not None
        return f"{files.log_dir}/{files.run_id}"

    option = f"--log-dir={tmp_path}/logs --rdzv-id=a"
    assert [folder(option), folder(option)] == [f"{tmp_path}/logs/a", f"{tmp_path}/logs/a_2"]
    made = Path(folder(""))
    assert made.parent.name.startswith("torchelastic_")
    made.rmdir()
    made.parent.rmdir()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_first_line_of_a_cluster_of_its_own_says_how_to_keep_one(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_start(_: EmbeddedCluster) -> None:
        raise ClusterError("not now")

    monkeypatch.setattr(EmbeddedCluster, "start", no_start)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    builder = DLJobBuilder().device_type("CPU").workload("worker", "w.run").total(1)
    spec = to_spec(submit_options(builder.build(), {"job_name": "j"}, {}))
    with pytest.raises(ClusterError, match="not now"):
        submit_job(spec, master="local")
    said = capsys.readouterr()
    line = "starting a cluster for this job (2 s); `unified up` keeps one\n"
    assert (said.out, said.err) == ("", line if is_terminal else "")
