"""Packed linear layers compute what the layers compute, and leave them as they were."""

import pytest
import torch
from torch import nn

from sparrow_trl.rollout.isolation import rollout_mode
from sparrow_trl.rollout.packing import MOST_ROWS, packed_linears
from tiny import tiny_model


class Interruption(Exception):
    pass


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS, MOST_ROWS + 1, 100])
@pytest.mark.parametrize("sizes", [(64, 96, False), (7, 5, True), (33, 49, True)])
def test_packed_layer_equals_a_product_in_float64(dtype, tolerance, rows, sizes):
    width, height, bias = sizes
    torch.manual_seed(0)
    layer = nn.Linear(width, height, bias=bias).to(dtype)
    inputs = torch.randn(1, rows, width).to(dtype)
    expected = inputs.double() @ layer.weight.double().T + (layer.bias.double() if bias else 0.0)
    with torch.no_grad(), packed_linears(layer, None) as packed:
        found = layer(inputs)
    assert packed == 1 and found.dtype == dtype
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_few_rows_use_the_packed_weight_and_many_the_layers_own():
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad(), packed_linears(layer, None):
        layer.weight.zero_()  # after packing, so that only the layer's own product sees it
        assert layer(torch.ones(1, MOST_ROWS, 8)).any()
        assert not layer(torch.ones(1, MOST_ROWS + 1, 8)).any()


def test_autocast_dtype_is_kept():
    layer = nn.Linear(16, 16)
    inputs = torch.randn(1, 2, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(inputs)
        with packed_linears(layer, torch.bfloat16):
            found = layer(inputs)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_layers_get_their_forward_back_after_an_exception():
    model = tiny_model("llama")
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    with pytest.raises(Interruption), rollout_mode(model, packed=True):
        assert all("forward" in vars(layer) for layer in layers)
        raise Interruption
    assert layers and not any("forward" in vars(layer) for layer in layers)


def test_layers_that_are_not_plain_are_left_alone():
    class Quantised(nn.Linear):
        pass

    own = nn.Linear(4, 4)
    own.forward = own_forward = lambda rows: rows + 1
    half = nn.Linear(4, 4).half()
    model = nn.ModuleList([Quantised(4, 4), own, half])
    with packed_linears(model, None) as packed:
        assert packed == 0
        assert own.forward is own_forward
    assert own.forward is own_forward
