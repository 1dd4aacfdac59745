"""The kernel project, as Hugging Face's `kernels` library sees it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loopback_hub import LoopbackHub


ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "kernels"
kernels = pytest.importorskip("kernels")


def build_variants():
    spec = importlib.util.spec_from_file_location("build_variants", PROJECT / "build_variants.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A kernel repository in a folder."""
    folder = tmp_path_factory.mktemp("repository")
    build_variants().build(folder / "build")
    return folder


def test_build_configuration_is_valid_and_current():
    from kernels._rust import Backend, Build

    code = f"from kernels._rust import Build; Build.open({str(PROJECT)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == ""  # a configuration of an older edition is warned about
    assert Build.open(PROJECT).general.backends == [Backend.CPU, Backend.CUDA, Backend.ROCm]


def test_metadata_and_digests_are_those_of_the_library(project):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    names = {path.name for path in (project / "build").iterdir()}
    assert names == {"torch-cpu", "torch-cuda", "torch-rocm"}
    ids = set()
    for name in names:
        metadata = Metadata.read_from_file(project / "build" / name / "metadata.json")
        assert (str(metadata.name), metadata.name.python_name, metadata.version) == (
            "sparrow-kernels",
            "sparrow_kernels",
            1,
        )
        assert (metadata.license, metadata.python_depends) == ("Apache-2.0", [])
        assert str(metadata.backend.backend_type).lower() == name.removeprefix("torch-")
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, project / "build" / name))
        ids.add(metadata.id)
    assert len(ids) == 3


def test_loads_and_runs_from_a_local_path(project):
    """The reference and the fast operation agree, in the package that the library loads."""
    loaded = kernels.get_local_kernel(project, backend="cpu")
    assert Path(loaded.__file__).parent == project / "build" / "torch-cpu"
    assert loaded.__name__ != "sparrow_kernels" and loaded.reference.__name__.startswith(loaded.__name__)
    torch.manual_seed(0)
    key, value = torch.randn(2, 5, 3, 16)
    slots = torch.tensor([4, 5, 6, 7, 8])
    pools = []
    for op, full in ((loaded.reference.store_kv, ()), (loaded.torch_ops.store_kv, (torch.tensor([1]),))):
        pool = [torch.zeros(3, 4, 4, 16), torch.zeros(3, 4, 4, 16), torch.zeros(3, 4, 16)]
        op(key, value, slots, *full, *pool)
        pools.append(pool)
    for found, expected in zip(*pools, strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(pools[0][0].flatten(1, 2)[:, 4:9], key.transpose(0, 1))


def test_folder_for_older_releases_exports_the_same(project):
    variant = project / "build" / "torch-cpu"
    spec = importlib.util.spec_from_file_location("older", variant / "sparrow_kernels" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert Path(module.reference.__file__) == variant / "reference.py"
    assert set(module.__all__ if hasattr(module, "__all__") else ()) <= set(dir(module))


def test_imports_are_relative_or_of_torch_and_triton():
    """What the library requires of Python kernels: several versions are loaded side by side under other names."""
    import ast

    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in sorted((PROJECT / "torch-ext" / "sparrow_kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.partition(".")[0] for name in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.partition(".")[0] in allowed, path


def test_push_to_a_kernel_repository(project, tmp_path):
    """The real client against a loopback server."""
    with LoopbackHub() as hub:
        env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_test"}
        env |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
        env.pop("HF_HUB_OFFLINE", None)
        code = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import build_variants;"
            "print(build_variants.push(Path(sys.argv[2]), 'someone/sparrow-kernels'))"
        )
        command = [sys.executable, "-c", code, str(PROJECT), str(project / "build")]
        run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        files = hub.files["someone/sparrow-kernels"]
    assert "/commit/" in run.stdout
    assert {"README.md", "build.toml", "build/torch-cuda/metadata.json", "build/torch-cuda/__init__.py"} <= set(files)
    assert json.loads(files["build/torch-cpu/metadata.json"])["backend"] == {"type": "cpu"}
    assert hub.branches == {"someone/sparrow-kernels": {"v1"}}
