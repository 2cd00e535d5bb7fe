"""Pods of rendered manifests as network namespaces of this machine: what a kubelet and the DNS do, and no API server.

A pod has a network, a host name, a file system, a PID namespace and a user of its own; its probes are asked over HTTP;
it is ended by SIGTERM and, after its grace, SIGKILL. A pod that is started again has its name and another address.
Played more simply than it is: names come from /etc/hosts, a Service with a virtual address is the address of its first
ready pod, and who makes pods (controllers, scheduler, Kueue) is the test.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.support.jobset import made_of
from tests.support.manifests import Object, read, template_of
from tests.support.probes import get_or_none
from unified.kubernetes.options import amount
from unified.testing import eventually

ROOT = Path(__file__).parents[2]
INIT = Path(__file__).parent / "programs/pod_init.py"
WITHIN_S = 180.0
_numbers = itertools.count()


class Pod:
    """A running pod.

    Args:
        name: of the pod, which is its host name.
        template: `spec.template` of its workload.
        values: of the fields of the downward API.
    """

    def __init__(
        self, kubelet: "Kubelet", name: str, template: Object, values: Mapping[str, str], address: str
    ) -> None:
        self.name = name
        self.address = address
        self.labels = template["metadata"]["labels"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.is_ready = False
        self.has_started = False
        self.num_ill = 0
        """Liveness probes that failed one after the other."""
        self.was_ill = ""
        """Answer of a liveness probe that failed."""
        self._values = {**values, "metadata.name": name, "status.podIP": address}
        number = next(_numbers)
        self.namespace = f"k{os.getpid() % 100_000}x{number}"
        self.folder = kubelet.folder / f"{name}-{number}"
        self.folder.mkdir()
        self.hosts = self.folder / "hosts"
        self.hosts.touch()
        self.log_file = self.folder / "log"
        self._kubelet = kubelet
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._plug_in()
        given = self.folder / "pod.json"
        given.write_text(json.dumps(self._facts()))
        # Each ends with its parent, so that the pod ends with this process, however that ends. Process 1 sets its own
        # signal for that: the one of --kill-child is forgotten when it gives up root.
        unshare = ["setpriv", "--pdeathsig=KILL", "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork"]
        enter = ["nsenter", f"--net=/run/netns/{self.namespace}"]
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*enter, *unshare, sys.executable, str(INIT), str(given)], stdout=log, stderr=log
            )

    def _plug_in(self) -> None:
        link = f"{self.namespace}v"
        ip("netns", "add", self.namespace)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        ip("link", "set", link, "master", self._kubelet.bridge, "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", self.namespace, "link", "set", device, "up")

    def _facts(self) -> Object:
        context = self.spec["securityContext"]
        root = self.folder / "root"
        root.mkdir()
        return {
            "root": str(root),
            "image": [sys.base_prefix, str(ROOT)],
            "workspace": str(self._kubelet.workspace),
            "hosts": str(self.hosts),
            "hostname": self.name,
            "volumes": [self._volume(mount, context["fsGroup"]) for mount in self.container["volumeMounts"]],
            "read_only": self.container.get("securityContext", {}).get("readOnlyRootFilesystem", False),
            "uid": context["runAsUser"],
            "gid": context["runAsGroup"],
            "group": context["fsGroup"],
            "command": self._expand([*self.container["command"], *self.container.get("args", [])]),
            "env": self.env,
        }

    def _volume(self, mount: Object, group: int) -> Object:
        name = mount["name"]
        source: Object = next((each for each in self.spec["volumes"] if each["name"] == name), {"claim": name})
        empty = source.get("emptyDir", {})
        found = {"path": mount["mountPath"], "read_only": mount.get("readOnly", False), "size": 0, "source": ""}
        if empty.get("medium") == "Memory":
            return {**found, "size": amount("sizeLimit", empty["sizeLimit"])}
        if secret := source.get("secret"):
            return {**found, "source": str(self._secret(secret, group))}
        claim = source.get("persistentVolumeClaim", {}).get("claimName") or f"{name}-{self.name}"
        folder = self.folder / name if "emptyDir" in source else self._kubelet.folder / f"claim-{claim}"
        folder.mkdir(exist_ok=True)
        os.chown(folder, 0, group)
        folder.chmod(0o2777 if "emptyDir" in source else 0o2775)
        return {**found, "source": str(folder)}

    def _secret(self, secret: Object, group: int) -> Path:
        """Files as the kubelet mounts them: root's, of the fsGroup, behind symbolic links."""
        folder = self.folder / "secret"
        data = folder / "..data_1"
        data.mkdir(parents=True)
        keys = [{"key": key, "path": key} for name, key in self._kubelet.secrets if name == secret["secretName"]]
        for item in secret.get("items", keys):
            file = data / item["path"]
            shutil.copy(self._kubelet.secrets[secret["secretName"], item["key"]], file)
            os.chown(file, 0, group)
            file.chmod(secret["defaultMode"])
            (folder / item["path"]).symlink_to(f"..data_1/{item['path']}")
        return folder

    @property
    def env(self) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
        for each in self.container["env"]:
            source = each.get("valueFrom", {})
            if ref := source.get("secretKeyRef"):
                found[each["name"]] = self._kubelet.secrets[ref["name"], ref["key"]].read_text()
            elif ref := source.get("fieldRef"):
                found[each["name"]] = self._values[ref["fieldPath"]]
            else:
                found[each["name"]] = each["value"]
        return found

    def _expand(self, words: list[str]) -> list[str]:
        env = self.env
        return [re.sub(r"\$\((\w+)\)", lambda match: env[match[1]], word) for word in words]

    @property
    def pid(self) -> int:
        """Process 1 of the pod, by its number outside; 0 if it has ended."""
        assert self.process is not None
        with contextlib.suppress(OSError, ValueError):
            return int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())
        return 0

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def exec(self, *words: str, env: Mapping[str, str] = MappingProxyType({})) -> str:
        """What a program prints that runs in the pod as its user, as with `kubectl exec`."""
        context = self.spec["securityContext"]
        user = [f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", f"--groups={context['fsGroup']}"]
        enter = ["nsenter", f"--target={self.pid}", "--all", "--root", "--wd"]
        command = [*enter, "setpriv", *user, *words]
        done = subprocess.run(command, env={**self.env, **env}, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self) -> int:
        """SIGTERM, the grace, SIGKILL; return the exit code."""
        assert self.process is not None
        if pid := self.pid:
            os.kill(pid, signal.SIGTERM)
        return self.wait(self.spec.get("terminationGracePeriodSeconds", 30))

    def wait(self, timeout_s: float = WITHIN_S) -> int:
        """Return the exit code of the container; a pod that takes too long is killed."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            code = -signal.SIGKILL
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True)
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        assert self.process is not None
        if pid := self.pid:
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(100)

    def probe(self) -> None:
        """Ask as the kubelet does: the start first, then both others."""
        ports = {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}

        def is_good(name: str) -> bool:
            request = self.container[name]["httpGet"]
            answer = get_or_none(ports[request["port"]], request["path"], self.address)
            if name == "livenessProbe" and (answer is None or answer[0] != 200):
                self.was_ill = f"{answer}"
            return answer is not None and answer[0] == 200

        if not self.has_started:
            self.has_started = is_good("startupProbe")
            return
        self.is_ready = is_good("readinessProbe")
        self.num_ill = 0 if is_good("livenessProbe") else self.num_ill + 1


class Kubelet:
    """Pods of one text of manifests.

    Args:
        secrets: files by name and key of a Secret.
        workspace: folder that the image has as its working directory.
    """

    def __init__(self, folder: Path, text: str, secrets: Mapping[tuple[str, str], Path], workspace: Path) -> None:
        self.folder = folder
        self.objects = [child for each in read(text) for child in made_of(each)]
        self.secrets = secrets
        self.workspace = workspace
        self.bridge = f"k{os.getpid() % 100_000}b{next(_numbers)}"
        self.subnet = f"10.80.{os.getpid() & 255}"
        self.pods: dict[str, Pod] = {}
        self.ended: list[Pod] = []
        self._addresses = itertools.count(10)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._prober = threading.Thread(target=self._probe, name="kubelet")

    def open(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("link", "set", self.bridge, "up")
        ip("address", "add", f"{self.subnet}.1/24", "dev", self.bridge)
        self._prober.start()

    def close(self) -> None:
        self._is_over.set()
        self._prober.join()
        for pod in [*self.pods.values(), *self.ended]:
            if pod.process is not None:
                pod.kill()
                pod.wait()
        subprocess.run(["ip", "link", "delete", self.bridge])

    def workload(self, name: str) -> Object:
        (found,) = (each for each in self.objects if "template" in each["spec"] and each["metadata"]["name"] == name)
        return found

    def start(self, workload: str, number: int) -> Pod:
        """Start a pod of a workload that numbers its pods, or start it anew, with another address."""
        index = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(number)}
        return self.start_pod(f"{workload}-{number}", template_of(self.workload(workload)), index)

    def start_pod(self, name: str, template: Object, values: Mapping[str, str] = MappingProxyType({})) -> Pod:
        address = f"{self.subnet}.{next(self._addresses)}"
        pod = Pod(self, name, template, values, address)
        with self._lock:
            if name in self.pods:
                self.ended.append(self.pods[name])
            self.pods[name] = pod
        self._write_hosts()
        pod.start()
        return pod

    def delete(self, name: str) -> int:
        """End a pod; return the exit code of its container. Its name is in no Service any more."""
        with self._lock:
            pod = self.pods.pop(name)
            self.ended.append(pod)
        self._write_hosts()
        return pod.end()

    def await_ready(self, *names: str) -> None:
        def are_ready() -> bool:
            for name in names:
                assert not self.pods[name].has_ended, self.pods[name].log
            return all(self.pods[name].is_ready for name in names)

        try:
            eventually(are_ready, timeout=WITHIN_S)
        except AssertionError as error:
            logs = {name: self.pods[name].log[-3000:] for name in names}
            raise AssertionError(f"{names} do not become ready: {logs}") from error

    def _probe(self) -> None:
        while not self._is_over.wait(0.5):
            with self._lock:
                pods = list(self.pods.values())
            before = [pod.is_ready for pod in pods]
            for pod in pods:
                if pod.process is not None and not pod.has_ended and "startupProbe" in pod.container:
                    pod.probe()
            if before != [pod.is_ready for pod in pods]:
                self._write_hosts()

    def _write_hosts(self) -> None:
        """Write what the DNS would say into each pod's file, in place, for it is bound there."""
        with self._lock:
            pods = list(self.pods.values())
        lines = list(self._names(pods))
        for pod in pods:
            own = [f"{pod.address} {pod.name}", "127.0.0.1 localhost"]
            with pod.hosts.open("r+") as file:
                file.write("\n".join([*own, *lines, ""]))
                file.truncate()

    def _names(self, pods: list[Pod]) -> Iterator[str]:
        for each in self.objects:
            if each["kind"] == "Service":
                name, spec = each["metadata"]["name"], each["spec"]
                chosen = [pod for pod in pods if spec["selector"].items() <= pod.labels.items()]
                if not spec.get("publishNotReadyAddresses"):
                    chosen = [pod for pod in chosen if pod.is_ready]
                if spec.get("clusterIP") == "None":
                    yield from (f"{pod.address} {pod.name}.{name}" for pod in chosen)
                yield from (f"{pod.address} {name}" for pod in chosen[: None if "clusterIP" in spec else 1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
