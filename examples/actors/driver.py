"""The role that the job waits for: it asks, chooses and decides when to stop."""

from __future__ import annotations

import remote_call

from unified import current_worker


def run() -> None:
    """Evolve a text towards a goal that only the judge knows."""
    config = current_worker().job_info.user_config
    best, score = "." * config.length, 0.0
    for generation in range(1, config.generations + 1):
        children = list(remote_call.mutate([best] * config.children))
        scores = remote_call.judge(children)
        leader = max(range(len(children)), key=scores.__getitem__)
        if scores[leader] > score:
            best, score = children[leader], scores[leader]
            remote_call.cool_down(max(0.02, 0.1 * (1 - score)))
        current_worker().report(step=generation, total=config.generations, score=round(score, 3), best=best)
        if generation % 20 == 1 or score == 1:
            print(f"generation {generation:3}: {score:4.0%}  {best}", flush=True)
        if score == 1:
            break
    made = remote_call.num_mutated()
    print(f"{sum(made)} texts by {len(made)} generators: {made}", flush=True)
    if score < 1:
        raise RuntimeError(f"after {config.generations} generations the best text is only {score:.0%} right: {best!r}")
