"""
Lay the package out as Hugging Face's `kernels` library loads it: one folder for each backend, `build/torch-<backend>/`.

    python kernels/build_variants.py                          # into kernels/build
    python kernels/build_variants.py --push user/repository   # and to the Hub, to the branch of the kernel's version

The files are the same for all backends. `kernel-builder` makes the same of `build.toml`, where Nix is at hand.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent
COMPATIBILITY = '''"""Releases of the library before the flat layout look for the package here."""

import importlib.util
import sys
from pathlib import Path


_spec = importlib.util.spec_from_file_location(f"{__name__}_package", Path(__file__).parents[1] / "__init__.py")
_package = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _package
_spec.loader.exec_module(_package)
globals().update({name: value for name, value in vars(_package).items() if not name.startswith("__")})
'''


def build(target: Path) -> list[Path]:
    """
    Write the variants into `target`, which is emptied first.

    Returns:
        `list[Path]`: the folder of each variant.
    """
    general = read_config()["general"]
    package = general["name"].replace("-", "_")
    source = PROJECT / "torch-ext" / package
    shutil.rmtree(target, ignore_errors=True)
    folders = []
    for backend in general["backends"]:
        folder = target / f"torch-{backend}"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(COMPATIBILITY, encoding="utf-8")
        metadata = describe(folder, general, backend)
        (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        folders.append(folder)
    return folders


def read_config() -> dict[str, Any]:
    """The contents of `build.toml`."""
    return tomllib.loads((PROJECT / "build.toml").read_text(encoding="utf-8"))


def describe(folder: Path, general: dict[str, Any], backend: str) -> dict[str, Any]:
    """The metadata of a variant. Its id, under which it is imported, is of its contents alone."""
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*.py"))
    }
    contents = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    package = general["name"].replace("-", "_")
    return {
        "id": f"_{package}_{backend}_{contents[:10]}",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": files},
    }


def push(target: Path, repo_id: str) -> str:
    """Upload the variants, `build.toml` and the README to the version's branch; returns the address of the commit."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    branch = f"v{read_config()['general']['version']}"
    api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    api.create_branch(repo_id, branch=branch, repo_type="kernel", exist_ok=True)
    files = {path.relative_to(target.parent): path for path in sorted(target.rglob("*")) if path.is_file()}
    files |= {Path(name): PROJECT / name for name in ("README.md", "build.toml")}
    commit = api.create_commit(
        repo_id,
        [CommitOperationAdd(name.as_posix(), path) for name, path in files.items()],
        commit_message="Upload the kernels",
        repo_type="kernel",
        revision=branch,
    )
    return commit.commit_url


def main() -> None:
    parser = argparse.ArgumentParser(description="Lay the kernels out for Hugging Face's `kernels` library.")
    parser.add_argument("--push", metavar="REPOSITORY", help="upload them to a kernel repository of the Hub")
    args = parser.parse_args()
    target = PROJECT / "build"
    for folder in build(target):
        print(folder)
    if args.push:
        print(push(target, args.push))


if __name__ == "__main__":
    main()
