"""A parameter server, and four workers that train one model with it, each at its own speed."""

import numpy as np

from unified import DLJobBuilder, RoleGroup, current_worker, rpc

TRUE = np.array([2.0, -3.0, 0.5])


class Server:
    def __init__(self) -> None:
        self.weights = np.zeros(len(TRUE))

    @rpc(idempotent=True)
    def pull(self) -> np.ndarray:
        return self.weights

    @rpc(concurrency=1, idempotent=True)  # once more does no harm
    def push(self, gradient: np.ndarray, rate: float = 0.1) -> None:
        self.weights = self.weights - rate * gradient


def work(steps: int = 100, batch: int = 32) -> None:
    server, rank = RoleGroup("server")[0].with_options(retries=3), current_worker().actor_info.rank
    rows = np.random.default_rng(rank)
    for step in range(steps):
        x = rows.normal(size=(batch, len(TRUE)))
        error = x @ (server.call(Server.pull).result() - TRUE)
        server.call(Server.push, x.T @ error / batch).result()
        current_worker().report(step=step + 1, total=steps, loss=float(np.mean(error**2)))
    print(f"worker {rank} is done; the weights are {server.call(Server.pull).result().round(2)}", flush=True)


if __name__ == "__main__":
    job = DLJobBuilder().node_num(2).device_per_node(1).device_type("CPU")
    job.workload("server", "submit.Server").resource(cpu=0.1)  # @rpc methods and no run(): a service
    job.workload("worker", "submit.work").total(4).resource(cpu=0.1)
    raise SystemExit(job.build().submit("parameter-server"))
