"""Adapters of the hf framework, and runs that begin with another run's weights: losses are those of TRL and PEFT."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.chat import CASES, LESS, PEFT, STEPS, losses, plain_losses, write
from tests.support.training_runs import TINY, TrainingRuns
from tests.training.conftest import needs_trl
from unified.training import RunCheckpointManager, RunLayout
from unified.training.arguments import HfArguments, parse_arguments

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # PEFT asks transformers for it
]
SIZES = {"learning_rate": 0.01, "per_device_train_batch_size": 4, "max_length": 256}


@pytest.fixture(autouse=True)
def peft() -> Any:
    needs_trl()
    return pytest.importorskip("peft")


def rows_of(method: str, tmp_path: Path) -> Path:
    form = {"pretrain": "text", "sft": "messages", "dpo": "preference", "reward": "preference"}[method]
    return write(tmp_path / f"{form}.jsonl", form)


def merged(peft: Any, base: Path, adapter: Path, folder: Path) -> Path:
    """A folder with a model and its tokenizer, the adapter merged into it."""
    import transformers

    below = transformers.AutoModelForCausalLM.from_pretrained(base)
    peft.PeftModel.from_pretrained(below, adapter).merge_and_unload().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def saved(runs: TrainingRuns, step: int, run_id: str) -> Path:
    return next(iter(runs.fetch(step, run_id).values())).parent


@pytest.mark.parametrize(("case", "world_size"), [("conversations", 1), ("conversations", 2), ("dpo", 1)])
def test_losses_are_those_of_peft(case: str, world_size: int, hf: TrainingRuns, model: Path, tmp_path: Path) -> None:
    method, _, ours, theirs = CASES[case]
    rows = rows_of(method, tmp_path)
    wanted = plain_losses(method, model, rows, world_size, **SIZES, **LESS, **theirs, lora=PEFT)
    found = losses(hf, world_size, dataset=str(rows), model=str(model), eval_fraction=0, lora={}, **LESS, **ours)
    assert len(wanted) == STEPS
    assert wanted[0] != wanted[-1]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_a_killed_run_ends_the_same_and_saves_its_adapter_alone(hf: TrainingRuns, model: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {
        **LESS,
        "dataset": str(rows_of("sft", tmp_path)),
        "model": str(model),
        "save_steps": 2,
        "lora": {"r": 2},
    }
    wanted = losses(hf, 2, "whole", **more)
    killed = hf.start("killed", 2, logging_steps=1, max_seq_len=256, **{"lr": 0.01, **more})
    hf.wait_for_step(2, killed, "killed")
    killed.signal(signal.SIGKILL, first=1)
    killed.wait()
    assert losses(hf, 2, "killed", resume=True, **more) == pytest.approx(wanted, abs=1e-6)
    found = [hf.checkpoints(name).read_mark(STEPS).metrics["eval_loss"] for name in ("whole", "killed")]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    files = {path.name: path for path in saved(hf, STEPS, "whole").iterdir()}
    assert {"adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_1.pth"} <= files.keys()
    assert "model.safetensors" not in files
    assert files["adapter_model.safetensors"].stat().st_size < (model / "model.safetensors").stat().st_size / 4
    assert json.loads(files["adapter_config.json"].read_text())["base_model_name_or_path"] == str(model)


def test_a_run_begins_with_another_runs_model(hf: TrainingRuns, model: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {**LESS, "model": str(model), "eval_fraction": 0}
    losses(hf, 1, "talk", dataset=str(rows_of("sft", tmp_path)), **more)
    rows = rows_of("dpo", tmp_path)
    found = losses(hf, 1, "choose", dataset=str(rows), method="dpo", from_run="talk", **more)
    wanted = plain_losses("dpo", saved(hf, STEPS, "talk"), rows, 1, **SIZES, **LESS)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert hf.checkpoints("choose").read_mark(STEPS).state["from_run"] == ["talk", STEPS]


def test_a_run_begins_with_another_runs_adapter(hf: TrainingRuns, peft: Any, model: Path, tmp_path: Path) -> None:
    """The second of three goes on from the step it began with, whatever the first one does later."""
    more: dict[str, Any] = {
        **LESS,
        "model": str(model),
        "eval_fraction": 0,
        "lora": {},
        "lr_scheduler_type": "constant",
    }
    of_peft = {**SIZES, **LESS, "lr_scheduler_type": "constant", "lora": PEFT}
    talks, pairs = rows_of("sft", tmp_path), rows_of("dpo", tmp_path)
    hf.train("talk", **{**more, "dataset": str(talks), "max_steps": 3})
    first = merged(peft, model, saved(hf, 3, "talk"), tmp_path / "first")
    choose: dict[str, Any] = {**more, "dataset": str(pairs), "method": "dpo", "from_run": "talk"}
    hf.train("choose", **{"logging_steps": 1, "max_seq_len": 256, "lr": 0.01, **choose, "max_steps": 3})
    hf.train("talk", resume=True, dataset=str(talks), **more)
    assert hf.checkpoints("talk").latest() == STEPS
    found = losses(hf, 1, "choose", resume=True, **choose)
    assert found == pytest.approx(plain_losses("dpo", first, pairs, 1, **of_peft), abs=1e-5)
    second = merged(peft, first, saved(hf, STEPS, "choose"), tmp_path / "second")
    found = losses(hf, 1, "again", dataset=str(talks), from_run="choose", **more)
    wanted = plain_losses("sft", second, talks, 1, **of_peft, assistant_only_loss=True)
    assert found == pytest.approx(wanted, abs=1e-5)

    other: dict[str, Any] = {
        "dataset": str(pairs),
        "model": str(model),
        "method": "dpo",
        "max_steps": 9,
        "resume": True,
    }
    assert "began with from_run='talk', and it is '' now" in hf.refused(run_id="choose", lora={}, **other)
    copy = merged(peft, model, saved(hf, STEPS, "talk"), tmp_path / "copy")
    line = hf.refused(run_id="new", **{**choose, "model": str(copy)})
    assert f"has an adapter of model {str(model)!r}, and model_id is {str(copy)!r} here" in line


@pytest.mark.parametrize(("method", "lora"), [("pretrain", {}), ("sft", {}), ("reward", None)])
def test_checkpointed_activations_change_no_loss(
    method: str, lora: dict[str, Any] | None, hf: TrainingRuns, model: Path, tmp_path: Path
) -> None:
    more: dict[str, Any] = {
        **LESS,
        "dataset": str(rows_of(method, tmp_path)),
        "model": str(model),
        "method": method,
        "lora": lora,
    }
    on, off = (
        losses(hf, 1, f"{given}", gradient_checkpointing=given, attn_implementation=attention, **more)
        for given, attention in ((True, "eager"), (False, "sdpa"))
    )
    assert on == pytest.approx(off, abs=1e-5)
    assert on[0] != on[-1]


def test_a_run_without_progress_stops_and_keeps_its_best_step(hf: TrainingRuns) -> None:
    """The rate is 0, so that the first evaluation is as good as all others."""
    more: dict[str, Any] = {"lr": 0, "max_steps": 9, "save_steps": 1, "save_total_limit": 1}
    more |= {"early_stopping_patience": 2, "load_best_model_at_end": True}
    ranks = hf.train(world_size=2, **more)
    assert "step 3 is the last one: 2 evaluations were no better" in ranks.text()
    assert "step 1 is the best one" in ranks.text()
    assert hf.checkpoints().complete_steps() == [1, 3]
    assert hf.checkpoints().read_mark(3).state["best_step"] == 1
    assert "nothing is left to train" in hf.train(resume=True, **more).text()
    assert hf.checkpoints().latest() == 3


def test_an_adapter_has_a_learning_rate_of_its_own() -> None:
    given: list[dict[str, Any]] = [{}, {"lora": {}}, {"lora": {}, "learning_rate": 0.1}, {"lora": None}]
    assert [parse_arguments("hf", each).lr for each in given] == [5e-5, 2e-4, 0.1, 5e-5]
    found = parse_arguments("hf", {"lora": {"r": 8}})
    assert isinstance(found, HfArguments)
    assert found.lora is not None
    assert parse_arguments("hf", {"quantization": "4bit"}).lr == 2e-4


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown layer": (
        {"lora": {"target_modules": ["q_proj", "v_prok"]}},
        "lora.target_modules: the model has no layer 'v_prok'. Did you mean 'v_proj'? It has down_proj, embed_tokens,",
    ),
    "a layer that bears none": ({"lora": {"target_modules": ".*"}}, "extra_args: "),
    "no regular expression": ({"lora": {"target_modules": "("}}, "lora.target_modules: the model has no layer '('"),
    "weights of few bits on a CPU": ({"quantization": "4bit"}, "quantization='4bit' needs an accelerator"),
    "an unknown attention": ({"attn_implementation": "eagre"}, "eagre"),
    "a run that is not there": ({"from_run": "nobody"}, "there is no run 'nobody' below file://"),
    "a run without checkpoints": ({"from_run": "empty"}, "run 'empty' of framework hf has no checkpoint of hf"),
    "a run of nemo": ({"from_run": "of-nemo"}, "run 'of-nemo' of framework nemo has no checkpoint of hf"),
    "patience without evaluations": (
        {"early_stopping_patience": 1, "save_steps": 0},
        "early_stopping_patience and load_best_model_at_end need evaluations",
    ),
    "a best step that is not saved": (
        {"load_best_model_at_end": True, "save_steps": 4, "eval_steps": 2},
        "load_best_model_at_end needs a checkpoint of each evaluation",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_payload(given: dict[str, Any], message: str, hf: TrainingRuns, tmp_path: Path) -> None:
    for name, framework in (("empty", "hf"), ("of-nemo", "nemo")):
        with RunCheckpointManager(RunLayout(f"file://{tmp_path}/runs", name, framework)) as store:
            store.persist_config({})
    line = hf.refused(model=TINY, max_steps=2, **given)
    assert message in line
