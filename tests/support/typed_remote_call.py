"""The `remote_call.py` of document 3, with its signatures in `typed_remote_call.pyi` (the document: "can be typed in
.pyi"): here is only how the calls are made."""

from unified.api.runtime.remote_call import bind


@bind("rollout", to="all")
def wake_up(): ...


@bind("rollout", to="batch")
def generate(prompts, scale=1): ...


@bind("rollout", to="stream")
def tokens(prompt): ...


@bind("rollout", to="rank0", timeout=100, retries=2)
def weight(name): ...
