"""Options of the manifests that Kubernetes or the daemons would refuse: one sentence each, and exit code 2."""

import pytest

from unified.cli.main import main
from unified.kubernetes.options import ClusterOptions, RunOptions, amount

BAD = {
    "cluster --name My_Cluster": "--name 'My_Cluster' is not allowed: lower-case letters, digits and '-', a letter",
    "cluster --name 1st": "--name '1st' is not allowed",
    "cluster --name ends-": "--name 'ends-' is not allowed",
    f"cluster --name {'x' * 41}": "at most 40 characters.",
    "cluster --name=": "--name '' is not allowed",
    "run --namespace Team": "--namespace 'Team' is no DNS label: lower-case letters, digits and '-'.",
    "run --image nginx:": "--image 'nginx:' is no image: write it as REGISTRY/NAME:TAG.",
    "run --image Has.Upper": "--image 'Has.Upper' is no image: write it as REGISTRY/NAME:TAG.",
    "cluster --agents -1": "--agents -1 is below 0.",
    "cluster --gpus -8": "--gpus -8 is below 0.",
    "cluster --grace -1": "--grace -1 is below 0.",
    "cluster --uid 0": "--uid 0 is below 1.",
    "cluster --agents two": "argument --agents: invalid int value: 'two'.",
    "cluster --agents 0 --gpus 8": "--gpus 8 belong to agents, and --agents is 0: give --agents as well.",
    "cluster --agents-as daemonset --agents 4": "--agents 4: a DaemonSet has one agent each node; --node-selector says",
    "cluster --agents-as pods": "argument --agents-as: invalid choice: 'pods'",
    "run --agents 0": "--agents 0: a run needs one at least, on which its driver is.",
    "run --retries -1": "--retries -1 is below 0.",
    "cluster --memory 64GB": "--memory '64GB' is no amount of memory: write it as Kubernetes does, such as 64Gi",
    "cluster --memory lots": "--memory 'lots' is no amount of memory",
    "cluster --memory -4Gi": "argument --memory: expected one argument",
    "cluster --memory 64": "--memory 64 is too little for an agent and its workers: 256Mi is the least.",
    "cluster --memory 4Gi --shm 5Gi": "--shm 5Gi must be above 0 and at most --memory 4Gi, which includes it.",
    "cluster --shm 0Gi": "--shm 0Gi must be above 0",
    "cluster --storage ten": "--storage 'ten' is no amount of memory",
    "cluster --cpus 0": "--cpus '0' is no number of CPUs: write 8, 0.5 or 500m.",
    "cluster --cpus many": "--cpus 'many' is no number of CPUs",
    "cluster --key-secret Key": "--key-secret 'Key' is no name of an object: lower-case letters, digits and '-'.",
    "cluster --key-secret=": "--key-secret '' is no name of an object",
    "run --queue Team_A": "--queue 'Team_A' is no name of an object",
    "run --claim data": "--claim 'data' is not NAME=VALUE.",
    "run --claim data=folder": "--claim data=folder cannot be mounted there: write CLAIM=/FOLDER, with a folder",
    "run --claim data=/tmp": "--claim data=/tmp cannot be mounted there",
    "run --claim data=/": "--claim data=/ cannot be mounted there",
    "run --claim a=/data --claim b=/data": "two claims have the folder /data: give each --claim a folder of its own.",
    "run --claim ok=/data --claim Data=/more": "--claim 'Data' is no name of an object",
    "run --env 1X=2": "--env '1X' is no name of a variable.",
    "run --env UNIFIED_HOME=/x": "--env UNIFIED_HOME is set by the manifest itself: leave it out.",
    "run --resource rdma/hca": "--resource 'rdma/hca' is not NAME=NUMBER.",
    "run --resource rdma/hca=some": "--resource 'rdma/hca=some' is not NAME=NUMBER.",
    "run --resource hca=1": "--resource hca=1 is no resource of a device plugin: write DOMAIN/NAME=NUMBER.",
    "run --gpu-resource gpu": "--gpu-resource 'gpu' is no resource of a device plugin: write DOMAIN/NAME.",
    "run --gpus 2 --resource nvidia.com/gpu=1": "--gpus and --resource both say how many nvidia.com/gpu a pod has",
    "run --uid 2147483648": "--uid 2147483648 is above 2147483647, the largest of Kubernetes.",
    "run --node-selector pool=a,b": "--node-selector pool=a,b is no label of a node.",
    "run --agens 3": "unrecognized arguments: --agens. Did you mean '--agents'?",
    "pod --node-id llm-0": "the following arguments are required: --address, --master-host",
}


@pytest.mark.parametrize(("words", "why"), BAD.items(), ids=BAD.keys())
def test_bad_options_are_refused_in_one_sentence(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = words.split() if words.startswith("pod") else ["render", *words.split()]
    assert main(["kubernetes", *command]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert why in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_amounts() -> None:
    assert [amount("", text) for text in ("1Ki", "1k", "1.5Gi", "256Mi")] == [1024, 1000, 1536 * 2**20, 2**28]


def test_defaults_that_depend_on_others() -> None:
    assert (ClusterOptions().num_agents, ClusterOptions().shm_size) == (2, "2048Mi")
    assert ClusterOptions(memory="1Ti", shm="64Gi").shm_size == "64Gi"
    assert RunOptions().command == ("unified", "submit", "job.py")
