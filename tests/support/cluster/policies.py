"""NetworkPolicies enforced on the test cluster, as a CNI would: by rules that do what they say, and nothing else.

All pods hang on one bridge, and what goes from one to another, straight or through a Service, passes the chain FORWARD
of the cluster's network namespace (machine/network.py). There a pod that a policy selects takes what one of these lets
in, answers, and what is its own; anything else is dropped without a word. What a node itself sends does not pass there:
kubelets' probes get through, as Kubernetes has it. Connections that are there already stay.

Only what comes in is enforced. A policy that says more is an error here: better no test than one that shows nothing.
"""

import ipaddress
import json
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.cluster.machine.network import INSIDE

CHAIN = "TANDEM-POLICIES"
LOOK_SECONDS = 0.3
"""Between two looks at what the cluster has."""
PLACES = {
    "In": lambda value, values: value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
}
"""Operators of a label selector."""
Object = Mapping[str, Any]


@dataclass(frozen=True)
class Endpoint:
    """A pod in the network."""

    namespace: str
    labels: Mapping[str, str]
    address: str
    ports: Mapping[str, int]
    """Numbers of its named ports."""


class NotEnforcedError(Exception):
    """A policy says what is not enforced here."""


def rules(policies: Sequence[Object], pods: Sequence[Object], namespaces: Sequence[Object]) -> str:
    """What `iptables-restore --noflush` takes: the whole chain.

    Raises:
        NotEnforcedError: a policy cannot be enforced as it is meant.
    """
    there = list(endpoints(pods))
    spaces = {one["metadata"]["name"]: one["metadata"].get("labels") or {} for one in namespaces}
    lines = ["*filter", f":{CHAIN} - [0:0]", _rule("-m conntrack --ctstate ESTABLISHED,RELATED", "RETURN")]
    for one in there:
        at_work = [policy for policy in policies if _is_about(policy, one)]
        if not at_work:
            continue
        lines.append(_rule(f"-s {one.address}/32 -d {one.address}/32", "RETURN"))
        for policy in at_work:
            for rule in policy["spec"].get("ingress") or ():
                sources = sorted(_sources(rule, policy["metadata"]["namespace"], there, spaces))
                lines += [
                    _rule(f"-s {source} -d {one.address}/32{port}", "RETURN")
                    for source in sources
                    for port in _ports(rule, one)
                ]
        lines.append(_rule(f"-d {one.address}/32", "DROP"))
    return "\n".join([*lines, "COMMIT", ""])


def endpoints(pods: Sequence[Object]) -> Iterator[Endpoint]:
    """The pods that have an address of their own. One that has ended has given it back."""
    for pod in pods:
        status, spec = pod.get("status", {}), pod["spec"]
        address = status.get("podIP")
        if not address or spec.get("hostNetwork") or status.get("phase") in ("Succeeded", "Failed"):
            continue
        metadata = pod["metadata"]
        containers = [*spec["containers"], *(spec.get("initContainers") or ())]
        ports = [port for container in containers for port in container.get("ports") or ()]
        named = {port["name"]: port["containerPort"] for port in ports if "name" in port}
        yield Endpoint(metadata["namespace"], metadata.get("labels") or {}, address, named)


def selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector means something that has these labels; an empty one means everything."""
    wanted = selector.get("matchLabels") or {}
    return wanted.items() <= labels.items() and all(
        PLACES[one["operator"]](labels.get(one["key"]), one.get("values") or ())
        for one in selector.get("matchExpressions") or ()
    )


def _is_about(policy: Object, one: Endpoint) -> bool:
    spec = policy["spec"]
    if spec.get("policyTypes", ["Ingress"]) != ["Ingress"] or "egress" in spec:
        raise NotEnforcedError(f"NetworkPolicy {policy['metadata']['name']} is not about what comes in alone")
    return policy["metadata"]["namespace"] == one.namespace and selects(spec.get("podSelector") or {}, one.labels)


def _sources(rule: Object, home: str, there: Sequence[Endpoint], spaces: Mapping[str, Mapping[str, str]]) -> set[str]:
    """Networks that a rule lets in. Without a `from`, everybody."""
    peers = rule.get("from") or ()
    return {one for peer in peers for one in _addresses(peer, home, there, spaces)} if peers else {"0.0.0.0/0"}


def _addresses(
    peer: Object, home: str, there: Sequence[Endpoint], spaces: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    if "ipBlock" in peer:
        if peer["ipBlock"].get("except"):
            raise NotEnforcedError("an ipBlock with exceptions")
        yield str(ipaddress.IPv4Network(peer["ipBlock"]["cidr"]))
        return
    for one in there:
        # Without a selector of namespaces, those of the policy's own are meant.
        near = one.namespace == home
        of = peer.get("namespaceSelector")
        inside = near if of is None else selects(of, spaces.get(one.namespace, {}))
        if inside and selects(peer.get("podSelector") or {}, one.labels):
            yield f"{one.address}/32"


def _ports(rule: Object, to: Endpoint) -> Iterator[str]:
    """Words of the ports that a rule opens of a pod; one without words opens all."""
    if not rule.get("ports"):
        yield ""
    for port in rule.get("ports") or ():
        protocol = port.get("protocol", "TCP").lower()
        number = port.get("port")
        if isinstance(number, str):
            number = to.ports.get(number)
            if number is None:
                continue
        last = f":{port['endPort']}" if "endPort" in port else ""
        yield f" -p {protocol}" + (f" --dport {number}{last}" if number is not None else "")


def _rule(matches: str, target: str) -> str:
    return f"-A {CHAIN} {matches} -j {target}"


class Enforcer:
    """Enforces the policies of some namespaces for a while.

    Args:
        namespaces: those whose policies count. Others run their tests undisturbed.
    """

    def __init__(self, *namespaces: str) -> None:
        self._namespaces = namespaces
        self._installed = ""
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="network-policies", daemon=True)

    def __enter__(self) -> "Enforcer":
        self._install(f"*filter\n:{CHAIN} - [0:0]\nCOMMIT\n")
        # Before kube-proxy's chains, which accept what they have translated.
        _inside("iptables", "-w", "-I", "FORWARD", "-j", CHAIN)
        try:
            self._look()
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._remove()
        if self._error is not None:
            raise self._error

    def keeps(self, address: str) -> bool:
        """Whether it keeps a pod's address from those whom no policy lets in."""
        if self._error is not None:
            raise self._error
        return _rule(f"-d {address}/32", "DROP") in self._installed.splitlines()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                self._look()
        except Exception as error:
            self._error = error

    def _look(self) -> None:
        found = json.loads(_run("kubectl", "get", "networkpolicies,pods,namespaces", "-A", "-o", "json"))["items"]
        policies, pods, namespaces = (
            [one for one in found if one["kind"] == kind] for kind in ("NetworkPolicy", "Pod", "Namespace")
        )
        ours = [one for one in policies if one["metadata"]["namespace"] in self._namespaces]
        wanted = rules(ours, pods, namespaces)
        if wanted != self._installed:
            self._install(wanted)

    def _install(self, text: str) -> None:
        # All at once: there is no moment without rules.
        _inside("iptables-restore", "-w", "--noflush", stdin=text)
        self._installed = text

    def _remove(self) -> None:
        _inside("iptables", "-w", "-D", "FORWARD", "-j", CHAIN)
        _inside("iptables", "-w", "-F", CHAIN)
        _inside("iptables", "-w", "-X", CHAIN)


def _inside(*command: str, stdin: str = "") -> None:
    _run(*INSIDE, *command, stdin=stdin)


def _run(*command: str, stdin: str = "") -> str:
    result = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise OSError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout
