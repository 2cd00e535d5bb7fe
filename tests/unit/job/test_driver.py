"""Which of a submitter's variables its workers on a cluster have."""

import pytest

from unified.errors import UsageError
from unified.job.driver import asked_for, passed_on


def test_what_a_user_sets_for_a_program_reaches_it() -> None:
    names = """
        FOO NAME WANDB_MODE HF_HOME TORCH_LOGS PYTHONHASHSEED OMP_NUM_THREADS NCCL_DEBUG
        TOKENIZERS_PARALLELISM PYTHONPATH MAX_TOKENS UNIFIED_STORAGE_BACKEND UNIFIED_LOG_LEVEL LANG
        """.split()  # noqa: SIM905
    env = dict.fromkeys(names, "1")
    assert passed_on(env) == (env, [])


def test_facts_of_a_host_and_decisions_of_the_cluster_do_not() -> None:
    names = """
        PATH LD_LIBRARY_PATH LD_PRELOAD MANPATH HOME USER PWD SHLVL _ HOSTNAME TMPDIR TERM DISPLAY
        SSH_AUTH_SOCK XDG_RUNTIME_DIR VIRTUAL_ENV CONDA_PREFIX PYTHONHOME SLURM_JOB_ID SLURMD_NODENAME
        PMI_RANK OMPI_COMM_WORLD_RANK KUBERNETES_SERVICE_HOST CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES RANK
        WORLD_SIZE MASTER_ADDR PET_NNODES TORCHELASTIC_RUN_ID UNIFIED_MASTER UNIFIED_HOME UNIFIED_KEY_FILE
        UNIFIED_CLUSTER_ID BASH_FUNC_x%%
        """.split()  # noqa: SIM905
    assert passed_on(dict.fromkeys(names, "1")) == ({}, [])


def test_credentials_are_withheld_and_named() -> None:
    secret = ["AWS_SECRET_ACCESS_KEY", "GITHUB_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "WANDB_API_KEY"]
    env = dict.fromkeys(secret, "x") | {"http_proxy": "http://me:word@h:1", "ENDPOINT": "http://h:1"}
    assert passed_on(env) == ({"ENDPOINT": "http://h:1"}, [*secret, "http_proxy"])


def test_what_cannot_be_sent_stays() -> None:
    assert passed_on({"A": "\udcff", "B": "b"}).env == {"B": "b"}


def test_what_is_asked_for_is_sent_whatever_it_is() -> None:
    found = asked_for(["FOO=a=b", "HF_TOKEN", "EMPTY="], {"HF_TOKEN": "x"})
    assert found == {"FOO": "a=b", "HF_TOKEN": "x", "EMPTY": ""}


@pytest.mark.parametrize(("word", "said"), [("9=1", "is no name"), ("=1", "is no name"), ("FOO", "no such variable")])
def test_what_makes_no_sense_is_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asked_for([word], {})
