"""Pins of the Go programs that the tests compile: what two of them need in one version is compiled once."""

import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.support import ROOT

CLUSTER = ROOT / "tests" / "support" / "cluster"
KUBERNETES = CLUSTER / "machine" / "modules" / "kubernetes"
NEWEST_KUEUE = CLUSTER / "kueue" / "newest"
"""The second of two versions of one program, which shares nothing with the first."""
COREDNS = CLUSTER / "machine" / "modules" / "coredns"
LIBRARIES = ("k8s.io/api", "k8s.io/apimachinery", "k8s.io/client-go", "k8s.io/kube-openapi", "k8s.io/utils")
BELOW = (
    "github.com/davecgh/go-spew",
    "github.com/emicklei/go-restful/v3",
    "github.com/fxamacker/cbor/v2",
    "github.com/go-logr/logr",
    "github.com/go-openapi/jsonpointer",
    "github.com/go-openapi/jsonreference",
    "github.com/go-openapi/swag",
    "github.com/google/gnostic-models",
    "github.com/json-iterator/go",
    "github.com/mailru/easyjson",
    "github.com/modern-go/reflect2",
    "github.com/pmezard/go-difflib",
    "github.com/spf13/pflag",
    "go.yaml.in/yaml/v2",
    "golang.org/x/net",
    "golang.org/x/oauth2",
    "golang.org/x/sys",
    "golang.org/x/term",
    "golang.org/x/text",
    "golang.org/x/time",
    "google.golang.org/protobuf",
    "gopkg.in/evanphx/json-patch.v4",
    "k8s.io/klog/v2",
    "sigs.k8s.io/json",
    "sigs.k8s.io/structured-merge-diff/v6",
    "sigs.k8s.io/yaml",
)
"""What those libraries are compiled from. CoreDNS needs higher ones than Kubernetes has, and shares none."""


def pins(text: str) -> dict[str, str]:
    """What a go.mod requires, and in which version."""
    required = re.sub(r"^exclude (?:\(.*?^\)|[^\n(]*$)", "", text, flags=re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"^\s*(?:require )?([^\s/]+/\S+) (v\S+)(?: // indirect)?$", required, re.MULTILINE))


def users(library: str, modules: list[Path]) -> dict[str, list[str]]:
    """Modules that require it, by version."""
    found = defaultdict[str, list[str]](list)
    for module in modules:
        version = pins((module / "go.mod").read_text(encoding="utf-8")).get(library)
        if version is not None:
            found[version].append(module.relative_to(CLUSTER).as_posix())
    return found


@pytest.fixture(scope="module")
def modules() -> list[Path]:
    found = sorted(path.parent for path in CLUSTER.rglob("go.mod") if path.parent != NEWEST_KUEUE)
    assert {KUBERNETES, COREDNS} < set(found)
    return found


@pytest.mark.parametrize("library", LIBRARIES)
def test_all_programs_have_kubernetes_libraries_of_one_version(library: str, modules: list[Path]) -> None:
    found = users(library, modules)
    assert len(found) == 1, found
    assert sum(map(len, found.values())) > 1, found


@pytest.mark.parametrize("library", BELOW)
def test_what_these_libraries_are_compiled_from_is_of_one_version(library: str, modules: list[Path]) -> None:
    found = users(library, [module for module in modules if module != COREDNS])
    assert len(found) == 1, found
    assert sum(map(len, found.values())) > 1, found


def test_only_what_is_required_is_a_pin() -> None:
    text = """\
require a.io/one v1.0.0

require (
\tb.io/two v2.0.0 // indirect
)

exclude c.io/three v3.0.0

exclude (
\tb.io/two v2.0.1
)

replace d.io/four => d.io/four v4.0.0
"""
    assert pins(text) == {"a.io/one": "v1.0.0", "b.io/two": "v2.0.0"}
