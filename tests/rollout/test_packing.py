"""Packed linear layers compute what the layers compute, and leave them as they were."""

import gc
import weakref

import pytest
import torch
from torch import nn

from sparrow_trl.low_rank import LowRankUpdate, UpdatedForward
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
        layer(inputs)  # the first call is the layer's own
        found = layer(inputs)
    assert packed == 1 and found.dtype == dtype
    assert (found.double() - expected).norm() <= tolerance * expected.norm()


def test_few_rows_use_the_packed_weight_and_many_the_layers_own():
    layer = nn.Linear(8, 8, bias=False)
    with torch.no_grad(), packed_linears(layer, None):
        for _ in range(2):
            layer(torch.ones(1, 2, 8))
        layer.weight.zero_()  # after packing, so that only the layer's own product sees it
        assert layer(torch.ones(1, MOST_ROWS, 8)).any()
        assert not layer(torch.ones(1, MOST_ROWS + 1, 8)).any()


def test_autocast_dtype_is_kept():
    layer = nn.Linear(16, 16)
    inputs = torch.randn(1, 2, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(inputs)
        with packed_linears(layer, torch.bfloat16):
            layer(inputs)
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


# --- layers that are fed the same tensor ---


class Fan(nn.Module):
    """Three layers on one input, one of them with a bias, and a fourth on what comes out."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(24, 40, bias=False), nn.Linear(24, 7)
        self.middle, self.last = nn.Linear(24, 40, bias=False), nn.Linear(40, 24)

    def forward(self, rows):
        return self.wide(rows) * self.middle(rows), self.narrow(rows)

    def chain(self, rows):
        product, _ = self(rows)
        return self.last(product)


def fan(dtype=torch.float32, updated=()):
    torch.manual_seed(0)
    model = Fan().to(dtype)
    for name, rank, scaling in updated:
        layer = getattr(model, name)
        update = LowRankUpdate(24, layer.out_features, rank, scaling, torch.Generator().manual_seed(1), "cpu")
        nn.init.normal_(update.B)
        layer.forward = UpdatedForward(layer, update)
    return model


def exact(layer, rows):
    """The product in float64, the update merged into the weight."""
    weight = layer.weight.double()
    forward = vars(layer).get("forward")
    if isinstance(forward, UpdatedForward):
        weight = weight + forward.update.scaling * forward.update.B.double() @ forward.update.A.double()
    bias = 0.0 if layer.bias is None else layer.bias.double()
    return rows.double() @ weight.T + bias


UPDATES = [("wide", 4, 2.0), ("narrow", 3, 0.5)]  # the one in the middle has none


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("updated", [(), UPDATES], ids=["plain", "updated"])
@pytest.mark.parametrize("shape", [(1, 5, 24), (3, 24), (24,), (2, 3, 4, 24), (1, 0, 24)])
def test_layers_fed_the_same_tensor_compute_their_own_products(dtype, tolerance, updated, shape):
    model = fan(dtype, updated)
    layers = [model.wide, model.middle, model.narrow]
    rows = torch.randn(shape).to(dtype)
    expected = [exact(layer, rows) for layer in layers]
    with torch.no_grad(), packed_linears(model, None) as packed:
        model(rows)
        found = [layer(rows) for layer in layers]
        groups = {layer.forward.group for layer in layers}
    assert packed == 4 and len(groups) == 1
    for product, reference in zip(found, expected, strict=True):
        assert product.dtype == dtype and product.shape == reference.shape
        assert (product.double() - reference).norm() <= tolerance * reference.norm()


def test_copies_go_when_the_context_ends():
    model = fan(updated=UPDATES)
    gc.disable()
    try:
        with torch.no_grad(), packed_linears(model, None):
            for _ in range(2):
                model(torch.randn(1, 2, 24))
            copy = weakref.ref(model.wide.forward.group.weight)
            assert copy() is not None
        assert copy() is None
    finally:
        gc.enable()


def test_a_layer_on_another_tensor_is_not_in_the_group():
    model = fan()
    with torch.no_grad(), packed_linears(model, None):
        model.chain(torch.randn(1, 2, 24))
        assert model.last.forward.group is not model.wide.forward.group
        assert [len(layer.forward.group.members) for layer in (model.wide, model.last)] == [3, 1]


def test_one_product_serves_the_group():
    model = fan()
    rows = torch.randn(1, 2, 24)
    with torch.no_grad(), packed_linears(model, None):
        model(rows)
        wide, middle, narrow = model.wide(rows), model.middle(rows), model.narrow(rows)
        assert wide.untyped_storage().data_ptr() == middle.untyped_storage().data_ptr()
        assert narrow.untyped_storage().data_ptr() == middle.untyped_storage().data_ptr()
        again = (
            model.wide(rows),
            model.wide(rows),
        )  # whoever asks twice gets a product of his own, which he may write to
        storages = {tensor.untyped_storage().data_ptr() for tensor in (wide, *again)}
        assert len(storages) == 3


def test_a_group_that_is_packed_takes_no_more_members():
    model = fan()
    rows = torch.randn(1, 2, 24)
    with torch.no_grad(), packed_linears(model, None):
        for layer in (model.wide, model.wide, model.middle, model.middle):
            torch.testing.assert_close(layer(rows), exact(layer, rows).float())


def test_the_input_is_let_go_when_all_have_asked():
    model = fan()
    rows = torch.randn(1, 2, 24)
    with torch.no_grad(), packed_linears(model, None):
        for _ in range(2):
            model(rows)
        alive = weakref.ref(rows)
        del rows
        assert alive() is None


def test_layers_are_not_multiplied_for_each_other_in_inference_mode():
    model = fan()
    with torch.inference_mode(), packed_linears(model, None):
        rows = torch.randn(1, 2, 24)
        for _ in range(2):
            model(rows)
        groups = [layer.forward.group for layer in (model.wide, model.middle, model.narrow)]
        assert [len(group.members) for group in groups] == [1, 1, 1] and all(group.is_packed for group in groups)


def test_an_update_can_be_suspended():
    model = fan(updated=UPDATES)
    rows = torch.randn(1, 2, 24)
    with torch.no_grad(), packed_linears(model, None):
        for _ in range(2):
            model(rows)
        model.wide.forward.update.suspended = True
        plain = rows.double() @ model.wide.weight.double().T
        torch.testing.assert_close(model.wide(rows), plain.float())


def test_double_precision_is_left_alone_by_autocast():
    layer = nn.Linear(8, 8).double()
    with packed_linears(layer, torch.bfloat16) as packed:
        assert packed == 0


def test_autocast_keeps_no_weight_of_the_first_call():
    layer = nn.Linear(64, 64, bias=False)  # its weight requires gradients, which is what autocast goes by
    rows = torch.randn(1, 2, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), packed_linears(layer, torch.bfloat16):
        layer(rows)
        layer.weight.zero_()
        assert not nn.functional.linear(rows, layer.weight).any()


@pytest.mark.parametrize("updated", [(), UPDATES], ids=["plain", "updated"])
def test_members_that_are_fed_different_tensors_get_what_they_ask_for(updated):
    model = fan(updated=updated)
    layers = [model.wide, model.middle, model.narrow]
    inputs = [torch.randn(1, 2, 24) for _ in layers]
    expected = [exact(layer, rows).float() for layer, rows in zip(layers, inputs, strict=True)]
    with torch.no_grad(), packed_linears(model, None):
        model(inputs[0])
        for _ in range(2):
            for layer, rows, reference in zip(layers, inputs, expected, strict=True):
                torch.testing.assert_close(layer(rows), reference)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_tensor_changed_in_place_is_multiplied_anew(mode):
    model = fan()
    with mode(), packed_linears(model, None):
        rows = torch.randn(1, 2, 24)  # in inference mode it does not count its changes
        model(rows)
        model.wide(rows)
        rows.mul_(2.0)
        torch.testing.assert_close(model.middle(rows), exact(model.middle, rows).float())


def test_an_update_that_is_zero_changes_nothing():
    plain, updated = fan(), fan(updated=UPDATES)
    for name, _, _ in UPDATES:
        nn.init.zeros_(getattr(updated, name).forward.update.B)
    rows = torch.randn(1, 5, 24)
    outputs = []
    for model in (plain, updated):
        with torch.no_grad(), packed_linears(model, None):
            model(rows)
            outputs.append(model(rows))
    for found, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("first", [2, MOST_ROWS + 1], ids=["decode", "prefill"])
def test_groups_are_seen_whatever_comes_first(first):
    model = tiny_model("llama")
    block = model.model.layers[0]
    with rollout_mode(model, attention=None, packed=True):
        model(input_ids=torch.ones(1, first, dtype=torch.long), use_cache=False)
        groups = [
            [name for name, module in block.named_modules() if getattr(module.forward, "group", None) is group]
            for group in (block.self_attn.q_proj.forward.group, block.mlp.up_proj.forward.group)
        ]
    assert groups == [
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
    ]
