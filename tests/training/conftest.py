import pytest
import torch

from draftwood.models.drafter import Drafter
from draftwood.models.target import Target
from draftwood.training.kernels import training_kernels
from support.tiny import write_drafter, write_target


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", scale=0.7), write_drafter(root / "drafter")


@pytest.fixture(scope="session")
def pair64(folders):
    """Target and drafter with training kernels, fp64."""
    kernels = training_kernels("cpu")
    target = Target.from_folder(folders[0], dtype=torch.float64, device="cpu", kernels=kernels)
    return target, Drafter.from_folder(
        folders[1], target=target, dtype=torch.float64, device="cpu", kernels=kernels
    )
