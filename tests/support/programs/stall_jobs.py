"""A trainer that makes a few steps, and then waits for an item that nobody puts."""

import threading

from unified import DataQueue, current_worker


def train() -> None:
    rewards: DataQueue[str] = DataQueue("rewards", is_master=True, size=8)
    rollouts: DataQueue[str] = DataQueue("rollouts", is_master=True, size=4)
    rewards.put("a", "b", "c")
    pause = threading.Event()
    for step in range(5):
        current_worker().report(step=step, total=1000, loss=1 / (step + 1))
        pause.wait(0.3)  # so that the master sees more than one step
    rollouts.get()
