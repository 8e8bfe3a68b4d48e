"""Helm, the sets of values that tests render the chart with, and what they ask of the result."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hocket.config import Config, load_config

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "hocket"
POOLS = ("prefill", "decode")
VALUES = {
    "default": (),
    "laptop": ("-f", str(CHART / "examples" / "laptop.yaml")),
    "gb200": ("-f", str(CHART / "examples" / "gb200-nvl72.yaml")),
}
Document = dict[str, Any]


@dataclass(frozen=True)
class Helm:
    """One Helm binary, with folders of its own."""

    binary: Path
    home: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs it; the caller looks at the exit code."""
        home = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        return subprocess.run(
            [str(self.binary), *arguments],
            env={**os.environ, "KUBECONFIG": str(self.home / "none"), **home},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def template(self, *arguments: str) -> list[Document]:
        """The documents that the chart renders as release "hocket" in namespace "serving"."""
        done = self("template", "hocket", str(CHART), "-n", "serving", *arguments)
        assert done.returncode == 0, done.stderr
        return documents(done.stdout)


def documents(text: str) -> list[Document]:
    """All documents of a YAML stream that are not empty."""
    return [d for d in yaml.load_all(text, Loader=yaml.CSafeLoader) if d]


def the(rendered_documents: list[Document], kind: str, name: str = "") -> Document:
    """The one document of this kind (and name)."""
    found = [
        document
        for document in rendered_documents
        if document["kind"] == kind and (not name or document["metadata"]["name"] == name)
    ]
    assert len(found) == 1, (kind, name, [d["metadata"]["name"] for d in found])
    return found[0]


def group_of(ray_cluster: Document, name: str) -> Document:
    """A worker group of the RayCluster."""
    (found,) = [g for g in ray_cluster["spec"]["workerGroupSpecs"] if g["groupName"] == name]
    return found


def config_of(documents: list[Document], folder: Path) -> Config:
    """Hocket's configuration as its own loader reads it from the ConfigMap."""
    path = folder / "hocket.toml"
    path.write_text(the(documents, "ConfigMap")["data"]["hocket.toml"])
    return load_config(path)


def pod_specs(documents: list[Document]) -> dict[str, Document]:
    """Every pod that comes of the documents, by a name that says where it is from."""
    found: dict[str, Document] = {}
    for document in documents:
        name, spec = document["metadata"]["name"], document.get("spec", {})
        if document["kind"] == "RayCluster":
            found["head"] = spec["headGroupSpec"]["template"]["spec"]
            for group in spec["workerGroupSpecs"]:
                found[group["groupName"]] = group["template"]["spec"]
        elif document["kind"] == "Pod":
            found[name] = spec
        elif "template" in spec:
            found[name] = spec["template"]["spec"]
    return found
