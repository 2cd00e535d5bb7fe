"""What a zygote is told to import before it forks, by the text of a job's programs."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from unified.client.preload import Preload, guess, guess_of, own_modules
from unified.job.spec import Blob, EntryPoint, JobSpec, RoleSpec

LAUNCH = Path(__file__).parents[3] / "benchmarks" / "launch"
DDP = "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n"


def job(folder: Path, *programs: str, total: int = 2) -> JobSpec:
    """A job of scripts, each of a role."""
    roles = []
    for number, text in enumerate(programs):
        (folder / f"{number}.py").write_text(text)
        entry = EntryPoint(kind="script", target=f"{number}.py")
        roles.append(RoleSpec(name=f"r{number}", kind="elastic", entry_point=entry, total=total))
    return JobSpec(name="j", roles=roles, working_dir=str(folder))


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (DDP, "all"),
        ("import torch\ntorch.optim.SGD([], 0.1)\n", "all"),
        ("import torch\nprint(torch.ones(1))\n", "torch"),
        ("import torch\nfrom unified import current_worker\n", ""),
        ("import json, os\nfrom pathlib import Path\nprint(os.environ['RANK'])\n", "none"),
        ("import json, mine\n", "torch"),
        ("from . import mine\n", "torch"),
        ("import subprocess\nsubprocess.run(['python', 'train.py'])\n", "torch"),
        ("import os\nos.execv('x', ['x'])\n", "torch"),
        ("__import__('torch')\n", "torch"),
        ("print 'python 2'\n", "torch"),
        ("", ""),
    ],
)
def test_a_program_is_judged_by_its_text(tmp_path: Path, program: str, wanted: Preload) -> None:
    assert guess(job(tmp_path, program)) == wanted


def test_one_rank_imports_for_itself_and_all_programs_of_a_job_count(tmp_path: Path) -> None:
    assert guess(job(tmp_path, DDP, total=1)) == "torch"
    assert guess(job(tmp_path, "import os\n", "import torch\n")) == "torch"
    assert guess(job(tmp_path, "import os\n", "import sys\n")) == "none"
    assert guess(job(tmp_path, "import os\n", DDP)) == "all"


def test_functions_are_read_where_workers_find_them_and_a_lost_file_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DDP)

    def of(entry: EntryPoint) -> JobSpec:
        role = RoleSpec(name="r", kind="elastic", entry_point=entry, total=2)
        return JobSpec(name="j", roles=[role], sys_path=["/nowhere", str(tmp_path)])

    assert guess(of(EntryPoint(kind="attribute", target="train", attribute="run"))) == "all"
    code = Blob(codec="pickle", data=b"\x80\x05...AdamW\x94optim\x94...")
    assert guess(of(EntryPoint(kind="value", target="__main__", code=code))) == "all"
    assert guess(of(EntryPoint(kind="script", target="lost.py"))) == ""
    assert guess_of(DDP) == "all"


def test_the_benchmark_s_scripts_are_what_they_stand_for(tmp_path: Path) -> None:
    texts = ((LAUNCH / name).read_text() for name in ("rank.py", "plain.py", "ddp.py"))
    assert [guess(job(tmp_path, text)) for text in texts] == ["torch", "none", "all"]


def test_a_job_s_own_cluster_imports_its_preload_itself_unless_other_zygotes_must(tmp_path: Path) -> None:
    """The agents have another zygote for a job with an interpreter or variables of its own."""
    spec = replace(job(tmp_path, DDP), preload=["transformers"])
    assert own_modules(spec) == ["transformers"]
    ours, theirs = ([replace(spec.roles[0], envs={name: "1"})] for name in ("UNIFIED_TRACE", "HF_HOME"))
    assert own_modules(replace(spec, roles=ours)) == ["transformers"]
    assert own_modules(replace(spec, roles=theirs)) == []
    assert own_modules(replace(spec, python="/venv/bin/python")) == []
    assert own_modules(replace(spec, requirements=["trl"])) == []
    assert own_modules(replace(spec, start_method="spawn")) == []
