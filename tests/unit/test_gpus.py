"""The driver's own tables, as a machine with GPUs shows them."""

import pytest

from tba.gpus import gpu_model

H100 = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 120\nGPU UUID: \t GPU-x\n"


def show(driver, *informations):
    for number, text in enumerate(informations):
        folder = driver / "gpus" / f"0000:{number}8:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(text)


def test_a_machine_without_a_driver_has_no_gpu(tmp_path):
    assert gpu_model(tmp_path) is None


def test_equal_gpus_have_one_name(tmp_path):
    show(tmp_path, H100, H100)
    assert gpu_model(tmp_path) == "NVIDIA H100 80GB HBM3"


def test_different_gpus_have_none_for_nobody_knows_which_is_used(tmp_path):
    show(tmp_path, H100, H100.replace("H100", "A100"))
    assert gpu_model(tmp_path) is None


@pytest.mark.parametrize(("path", "whole"), [("capabilities/gpu0/mig/gi3", False), ("capabilities/gpu0/mig", True)])
def test_a_gpu_that_is_cut_up_is_not_a_whole_one(tmp_path, path, whole):
    show(tmp_path, H100)
    (tmp_path / path).mkdir(parents=True)
    assert (gpu_model(tmp_path) is not None) == whole
