"""The training program as a process of its own and under torchrun's variables: layout, resume, stop, errors."""

import contextlib
import io
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import training
from tests.support.deadlines import missed
from tests.support.s3 import S3Server, faulty
from tests.support.training import Ranks, complete_steps, keys, losses, options, run_ranks
from unified.storage import open_storage
from unified.testing import eventually
from unified.training.program import main
from unified.training.scratch import scratch_folder

SAVED = [f"checkpoints/step-{step:06}.{kind}" for step in (10, 20) for kind in ("json", "pt")]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return training.write_rows(tmp_path)


@pytest.fixture
def base(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run one rank in this process; return its exit code and the lines of stderr."""
    code = main(argv)
    return code, capsys.readouterr().err.strip()


@pytest.mark.slow
def test_a_run_from_bucket_to_bucket(bucket: str) -> None:
    base, dataset = f"s3://{bucket}/runs/", f"s3://{bucket}/data/rows.jsonl"
    backend, _ = open_storage(f"s3://{bucket}")
    with backend:
        backend.write("data/rows.jsonl", training.rows())
    codes, outputs = run_ranks(options(base, dataset, max_steps=20))
    assert codes == [0, 0], outputs
    assert keys(base) == [*SAVED, "config/run.json", "logs/.keep"]
    found = losses(outputs[0])
    assert list(found) == list(range(1, 21))
    assert found[20] < 0.8 * found[1]
    layout = training.layout(base)
    backend, prefix = open_storage(layout.prefix)
    with backend:
        config = json.loads(backend.read(f"{prefix}/config/run.json"))
        logs = {stat.key.rpartition("/")[2]: backend.read(stat.key) for stat in backend.list(f"{prefix}/logs/2")}
        mark = json.loads(backend.read(f"{prefix}/checkpoints/step-000020.json"))
    assert config["arguments"]["max_steps"] == 20
    assert config["extra_args"]["lr"] == 0.01
    assert (config["model_id"], config["world_size"]) == (training.TINY, 2)
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    assert b"rank 1 of 2" in logs["rank-1.log"]
    assert b"step 20/20 loss=" in logs["rank-0.log"]
    assert (mark["step"], mark["world_size"], mark["framework"], mark["run_id"]) == (20, 2, "meta", "run-1")
    assert [file["name"] for file in mark["files"]] == ["step-000020.pt"]
    assert {"loss", "eval_loss", "lr"} <= mark["metrics"].keys()


@pytest.mark.slow
def test_ranks_train_as_one_would(data: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row counts once: two ranks with half the batch make the same steps as one."""
    codes, outputs = run_ranks(options(base, data, run_id="two", max_steps=10))
    assert codes == [0, 0], outputs
    assert main(options(base, data, run_id="one", max_steps=10, batch_size=8)) == 0
    assert main(options(base, data, run_id="accumulated", max_steps=10, gradient_accumulation=2)) == 0
    one, accumulated = (losses(part) for part in capsys.readouterr().out.split("training rows")[1:])
    assert losses(outputs[0]) == pytest.approx(one, rel=1e-3)
    assert accumulated == pytest.approx(one, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_is_the_same_run(data: str, base: str, world_size: int) -> None:
    """Stopped in the middle of the second epoch and resumed: the same losses, step for step."""
    arguments: dict[str, Any] = {"num_epochs": 6, "batch_size": 16 // world_size, "warmup_steps": 5}
    codes, outputs = run_ranks(options(base, data, run_id="whole", **arguments), world_size)
    assert codes == [0] * world_size, outputs
    whole = losses(outputs[0])
    argv = options(base, data, **arguments)
    ranks = Ranks(argv, world_size)
    ranks.await_line("step 23/")
    ranks.send_signal(world_size - 1, signal.SIGTERM)
    codes, outputs = ranks.wait()
    assert codes == [143] * world_size, outputs
    assert f"unified-train: stopped after step {complete_steps(base)[-1]}" in outputs[0]
    stopped_at = complete_steps(base)[-1]
    assert 23 <= stopped_at < len(whole)
    codes, outputs = run_ranks(argv, world_size)
    assert codes == [2] * world_size
    assert f"run 'run-1' already has checkpoints up to step {stopped_at}" in outputs[0]
    codes, outputs = run_ranks([*argv, "--resume"], world_size)
    assert codes == [0] * world_size, outputs
    rest = losses(outputs[0])
    assert list(rest) == list(range(stopped_at + 1, len(whole) + 1))
    assert rest == pytest.approx({step: whole[step] for step in rest}, rel=1e-4)


@pytest.mark.slow
def test_a_killed_run_is_resumed_with_other_ranks(data: str, base: str) -> None:
    codes, outputs = run_ranks(options(base, data, run_id="whole", max_steps=120), 2)
    assert codes == [0, 0], outputs
    whole = losses(outputs[0])
    argv = options(base, data, max_steps=120)
    ranks = Ranks(argv, 2)
    ranks.await_line("step 35/")
    ranks.send_signal(0, signal.SIGKILL)
    codes, _ = ranks.wait()
    assert codes[0] == -signal.SIGKILL
    assert codes[1] not in (0, 143)
    codes, outputs = run_ranks([*options(base, data, max_steps=120, batch_size=8), "--resume"], 1)
    assert codes == [0], outputs
    assert re.search(r"resume_step=\d+0\n", outputs[0])
    assert complete_steps(base)[-1] == 120
    assert losses(outputs[0])[120] == pytest.approx(whole[120], rel=0.02)
    codes, outputs = run_ranks([*argv, "--resume"], 2)
    assert codes == [0, 0], "there is nothing left to do"
    assert losses(outputs[0]) == {}


def test_a_restart_of_the_same_attempt_goes_on(data: str, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTEMPT_ID", "attempt-1")
    argv = options(base, data, max_steps=20)
    assert main(argv) == 0
    backend, _ = open_storage(training.layout(base).checkpoints_uri)
    backend.delete("step-000020.json")  # the kill came before this
    assert main(argv) == 0
    assert complete_steps(base) == [10, 20]
    monkeypatch.setenv("ATTEMPT_ID", "attempt-2")
    assert main(argv) == 2


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept(data: str, base: str) -> None:
    assert main(options(base, data, max_steps=25, save_total_limit=2, lr_scheduler_type="linear")) == 0
    assert complete_steps(base) == [20, 25]
    assert "checkpoints/step-000010.pt" not in keys(base)


@pytest.mark.slow
def test_bf16_and_a_tied_decoder_with_grouped_heads(data: str, base: str) -> None:
    model = "config:{hidden_size: 16, num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}"
    codes, outputs = run_ranks(options(base, data, model=model, max_steps=4, precision="bf16", save_steps=0))
    assert codes == [0, 0], outputs
    assert main([*options(base, data, model=model, max_steps=6, precision="bf16"), "--resume"]) == 0
    state = torch.load(Path(base, "run-1/framework=meta/checkpoints/step-000006.pt"), weights_only=True)
    assert state["model"]["embed_tokens.weight"].dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_is_used_in_bf16(data: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.cuda.reset_peak_memory_stats()
    assert main(options(base, data, max_steps=20)) == 0
    text = capsys.readouterr().out
    assert ", cuda:0" in text
    assert "precision=bf16" in text
    assert losses(text)[20] < 0.8 * losses(text)[1]
    assert torch.cuda.max_memory_allocated() > 0
    assert main([*options(base, data, max_steps=30), "--resume"]) == 0
    assert complete_steps(base)[-1] == 30


def test_a_checkpoint_of_other_rows(data: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(base, data, max_steps=4)) == 0
    code, error = said([*options(base, data, max_steps=8, eval_fraction=0.5), "--resume"], capsys)
    assert code == 2
    assert "is of a run on" in error


def test_a_folder_of_a_killed_process_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("killed", "evil", "young"):
        (tmp_path / f"unified-train-{name}").mkdir()
    (tmp_path / "unified-train-killed/.lock").touch()
    os.utime(tmp_path / "unified-train-killed/.lock", (1, 1))
    (tmp_path / "unified-train-evil/.lock").symlink_to(victim)
    with scratch_folder(tmp_path) as own:
        assert {path.name for path in tmp_path.glob("unified-train-*")} == {
            "unified-train-evil",
            "unified-train-young",
            own.name,
        }
    assert victim.read_text() == "precious"
    assert not own.exists()


def test_a_checkpoint_of_another_model(data: str, base: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options(base, data, max_steps=2)) == 0
    model = "config:{hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2}"
    code, text = said([*options(base, data, model=model, max_steps=4), "--resume"], capsys)
    assert code == 2
    assert "checkpoint 2 is of another model: the shape of embed_tokens.weight is (259, 16) there and (259, 32)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset_text_field": "body"}, "rows.jsonl has no field 'body'"),
        ({"lr": "fast"}, "extra_args: lr='fast' is not allowed"),
        ({"precision": "fp16"}, "cpu does not support precision=fp16"),
        ({"model": "config:{hidden_sizes: 4}"}, "there is no key 'hidden_sizes'. Did you mean 'hidden_size'?"),
        ({"model": "config:{hidden_size: 5}"}, "hidden_size 5 must be a multiple"),
        ({"model": "config:{vocab_size: 5}"}, "the model has 5 tokens and its tokenizer 259"),
        ({"model": "/nowhere/model"}, "the model /nowhere/model is not there"),
        ({"model": "s3://no-such-bucket-here/model"}, "no bucket 'no-such-bucket-here'"),
        ({"dataset": "s3://no-such-bucket-here/a.jsonl"}, "no-such-bucket-here"),
        ({"dataset": "/nowhere/rows.jsonl"}, "/nowhere/rows.jsonl is not there"),
        ({"base": "s3://no-such-bucket-here/runs"}, "no bucket 'no-such-bucket-here'"),
        ({"framework": "jax"}, "there is no framework 'jax'"),
        ({"run_id": "../up"}, "run_id '../up' is not allowed"),
    ],
)
def test_bad_input_ends_with_one_line(
    s3_environment: object,
    data: str,
    base: str,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text = said(options(**{"base": base, "dataset": data, "max_steps": 5, **change}), capsys)
    assert code == 2
    assert text.startswith("unified-train: ")
    assert message in text
    assert "\n" not in text


def test_every_rank_says_the_same(data: str, base: str) -> None:
    Path(data).write_bytes(training.rows(5) + b"{}\n")
    codes, outputs = run_ranks(options(base, data, max_steps=5))
    assert codes == [2, 2]
    line = f"unified-train: row 5 of {data} has no field 'text'; its fields: none. "
    line += "extra_args.dataset_text_field names the field with the text."
    assert [output.splitlines()[-1] for output in outputs] == [line, line]


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_store_that_refuses_connections_is_said_soon(
    s3_environment: object, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    code, text = said(options("s3://some-bucket/runs", data), capsys)
    assert code == 2
    assert "s3://some-bucket" in text
    assert "check the endpoint and the network" in text


def test_a_store_that_never_answers_is_said_soon(
    s3_environment: object, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("unified.training.program.REACH_WITHIN_S", missed(1.0))
    with silent_server() as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        code, text = said(options("s3://some-bucket/runs", data), capsys)
    assert code == 2
    assert "check the endpoint and the network" in text


@pytest.mark.parametrize(("fault", "message"), [("deny", "AccessDenied"), ("busy", "HTTP 503")])
def test_a_store_that_refuses(
    s3_environment: S3Server,
    data: str,
    fault: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with faulty(s3_environment, lambda asked: fault) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        code, text = said(options("s3://some-bucket/runs", data), capsys)
    assert code == 2
    assert message in text
    assert "\n" not in text


@pytest.mark.slow
def test_a_store_that_is_full_ends_the_run_and_older_checkpoints_stay(
    s3_environment: S3Server, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = f"s3://{s3_environment.make_bucket()}/runs"
    with faulty(s3_environment, lambda asked: "full" if "step-000020.pt" in asked.path else None) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        code, text = said(options(base, data, max_steps=40), capsys)
    assert code == 1, "no error of the user's making: in a job it is tried again"
    assert "step-000020.pt" in text
    assert "\n" not in text
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_environment.url)
    assert complete_steps(base) == [10]


def test_a_bucket_without_permission(
    s3_environment: object, data: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    code, text = said(options("s3://some-bucket/runs", data), capsys)
    assert code == 2
    assert "no usable credentials" in text
    assert "\n" not in text


def test_output_is_copied_in_bounded_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unified.training.log_upload import LogUploader

    monkeypatch.setattr("unified.training.log_upload.CHUNK_NBYTES", 1000)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    backend, _ = open_storage(tmp_path)

    def work() -> None:
        with LogUploader(f"file://{tmp_path}/logs", "rank-3", 0.01):
            for number in range(300):
                print(f"line {number:05}")
                if number == 150:
                    eventually(lambda: backend.exists("logs/rank-3.log"))
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        work()
    names = [stat.key for stat in backend.list("logs/")]
    assert names == ["logs/rank-3.1.log", "logs/rank-3.2.log", "logs/rank-3.3.log", "logs/rank-3.log"]
    text = b"".join(backend.read(name) for name in [names[-1], *names[:-1]]).decode()
    assert text.splitlines()[:300] == [f"line {number:05}" for number in range(300)]
    assert text.endswith("ValueError: broken\n")
    assert all(stat.nbytes < 2000 for stat in backend.list("logs/"))
