"""The `remote_call.py` of document 3, with its signatures in `typed_remote_call.pyi` (the document: "can be typed in
.pyi"): here is only what the calls do."""

from unified.api.runtime import RoleGroup


def wake_up():
    RoleGroup("rollout").call(wake_up).result()


def generate(prompts, scale=1):
    return RoleGroup("rollout").call_batch(generate, len(prompts), prompts, scale=scale)


def tokens(prompt):
    return RoleGroup("rollout")[0].stream(tokens, prompt)


def weight(name):
    return RoleGroup("rollout").with_options(timeout=5, retries=2).call_rank0(weight, name).result()
