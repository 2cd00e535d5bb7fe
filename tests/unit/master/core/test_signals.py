"""Signals that a client has passed on to the workers of a job."""

import signal

import pytest

from tests.support.master import Bench, elastic, simple
from unified.protocol.agent_master import PassSignal
from unified.protocol.client_master import Done, Refused, SignalWorkers


def test_those_that_run_have_it_on_each_node(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(elastic(total=2, accelerator=1, per_group=1), simple("s"), nodes=2, devices=1)
    bench.finish("s")
    orders: dict[str, PassSignal] = {}
    for node in ("n1", "n2"):
        agent = bench.agent(node)
        receive = agent.receive

        def received(
            now: float, request_id: int, message: object, node: str = node, receive: object = receive
        ) -> object:
            if isinstance(message, PassSignal):
                orders[node] = message
            return receive(now, request_id, message)  # type: ignore[operator]

        monkeypatch.setattr(agent, "receive", received)
    done = bench.world.get(Done, SignalWorkers(job="job", signal=signal.SIGUSR1))
    assert done.note == f"signal {signal.SIGUSR1:d} is sent to 2 workers."
    bench.world.run(0.1)
    names = {worker.node: [worker.name] for worker in bench.job.ranks("e")}
    assert {node: (order.workers, order.signal) for node, order in orders.items()} == {
        node: (workers, signal.SIGUSR1) for node, workers in names.items()
    }


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_none(number: signal.Signals) -> None:
    bench = Bench(simple("s"))
    refused = bench.world.get(Refused, SignalWorkers(job="job", signal=number))
    assert refused.reason == f"{number.name} is a stop: stop the job."
    assert bench.world.get(Refused, SignalWorkers(job="job", signal=4711)).reason == "4711 is no signal."
