from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from specserve.models.checkpoints.shapes_only import shapes_only


def test_parameters_have_shapes_and_buffers_their_numbers() -> None:
    with shapes_only():
        norm = nn.BatchNorm1d(3, dtype=torch.bfloat16)
    assert norm.weight.is_meta
    assert norm.weight.shape == (3,)
    assert norm.weight.dtype == torch.bfloat16
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [1, 1, 1]


def test_marks_of_a_parameter_are_kept() -> None:
    parameter: Any = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.mark = 7
    module: Any = nn.Module()
    with shapes_only():
        module.register_parameter("weight", parameter)
        module.register_parameter("bias", None)
    assert module.weight.is_meta
    assert module.weight.mark == 7
    assert not module.weight.requires_grad
    assert module.bias is None


def test_another_thread_gets_weights_meanwhile() -> None:
    with ThreadPoolExecutor(1) as pool, shapes_only():
        assert not pool.submit(nn.Linear, 2, 2).result().weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta


def test_threads_may_finish_in_any_order() -> None:
    first_is_in, second_is_in = threading.Event(), threading.Event()

    def build_first() -> None:
        with shapes_only():
            first_is_in.set()
            assert second_is_in.wait(60)

    def build_second() -> bool:
        assert first_is_in.wait(60)
        with shapes_only():
            second_is_in.set()
            first.result()
            return bool(nn.Linear(2, 2).weight.is_meta)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(build_first)
        assert pool.submit(build_second).result()
    assert not nn.Linear(2, 2).weight.is_meta


def test_blocks_within_one_another_end_with_the_outer_one() -> None:
    with shapes_only():
        with shapes_only():
            pass
        assert nn.Linear(2, 2).weight.is_meta
        with pytest.raises(ZeroDivisionError), shapes_only():
            raise ZeroDivisionError
        assert nn.Linear(2, 2).weight.is_meta
    assert not nn.Linear(2, 2).weight.is_meta
