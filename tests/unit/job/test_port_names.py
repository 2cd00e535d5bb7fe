"""``{port}`` in the texts of a role: which ports they name, and what stands there in the worker."""

import pytest

from unified.api.builder import DLJobBuilder
from unified.errors import JobError, UsageError
from unified.job.names import MAX_PORTS, num_ports, quoted_ports, with_ports

PORTS = [20_100, 20_200, 20_300]


@pytest.mark.parametrize(
    ("text", "num", "there"),
    [
        ("--port={port}", 1, "--port=20100"),
        ("{port0},{port1}", 2, "20100,20200"),
        ("http://0.0.0.0:{port2}/v1", 3, "http://0.0.0.0:20300/v1"),
        ('{"port": {port1}, "a": {"b": {}}}', 2, '{"port": 20200, "a": {"b": {}}}'),
        ("{port}{port}", 1, "2010020100"),
        ("port {ports} { port} {port } {port-1} {porta} {Port} {} {0}", 0, None),
        ("echo ${port} ${port1}", 0, None),  # variables of a shell
        ("{{port}} {{port1}} {port}", 1, "{port} {port1} 20100"),
        ("{{port} {port}}", 1, "{20100 20100}"),
        ("{port٣} {port12345678901}", 0, None),
    ],
)
def test_only_the_names_of_ports_are_replaced(text: str, num: int, there: str | None) -> None:
    assert num_ports([text]) == num
    assert with_ports(text, PORTS[:num]) == (text if there is None else there)


@pytest.mark.parametrize(
    "text", ["{port}", "x{{port}}y", "{{{port3}}}", "{{port}", "http://{host}:{port}/{port64}", "{}"]
)
def test_a_quoted_text_comes_out_as_it_was(text: str) -> None:
    assert num_ports([quoted_ports(text)]) == 0
    assert with_ports(quoted_ports(text), []) == text


def test_the_highest_name_of_all_texts_counts() -> None:
    assert num_ports(["{port1}", "", "{port}", "{port2}"]) == 3
    assert num_ports([]) == 0
    assert num_ports([f"{{port{MAX_PORTS - 1}}}"]) == MAX_PORTS
    with pytest.raises(UsageError, match=r"\{port64\} is no port of a worker: the last is \{port63\}"):
        num_ports(["{port}", "{port64}"])


def test_a_description_with_a_port_beyond_the_limit_is_refused() -> None:
    def job() -> DLJobBuilder:
        return DLJobBuilder().node_num(1).device_per_node(1).device_type("CPU")

    wrong = r"\{port99\} is no port of a worker: the last is \{port63\}"
    with pytest.raises(JobError, match=rf"role 'server': entry_point: {wrong}"):
        job().workload("server", "serve.py --port {port99}").resource(cpu=1).build()
    with pytest.raises(JobError, match=rf"role 'server': envs?: {wrong}"):
        job().workload("server", "serve.run").env({"URL": "http://h:{port99}"}).resource(cpu=1).build()
    with pytest.raises(JobError, match=rf"global_env: {wrong}"):
        job().global_env({"P": "{port99}"}).workload("server", "serve.run").resource(cpu=1).build()
    job().workload("server", "serve.py --port {port63}").env({"P": "{port}"}).resource(cpu=1).build()
