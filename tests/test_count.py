"""Every counter against a closed formula: a counter that is wrong would make every lesson wrong."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from speedlab import count


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@pytest.mark.parametrize(("batch", "tokens", "width"), [(8, 64, 192), (1, 16, 32), (3, 5, 64)])
def test_saved_bytes_of_an_mlp_by_formula(batch, tokens, width):
    """LayerNorm's input and two statistics, two Linears' inputs and the GELU's input, each four bytes."""
    model, x = mlp(width), torch.randn(batch, tokens, width)
    elements = batch * tokens * width
    assert count.saved_bytes(lambda: model(x), model).bytes == 4 * (10 * elements + 2 * batch * tokens)


@pytest.mark.parametrize(("batch", "tokens", "width"), [(8, 64, 192), (1, 16, 32)])
def test_saved_bytes_under_autocast_count_the_cast_weights(batch, tokens, width):
    model, x = mlp(width), torch.randn(batch, tokens, width)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        saved = count.saved_bytes(lambda: model(x), model)
    elements, rows = batch * tokens * width, batch * tokens
    assert saved.bytes == 4 * (elements + 2 * rows) + 2 * 9 * elements + 2 * 8 * width**2
    assert {t.dtype for t in saved.tensors} == {"fp32", "bf16"}


def test_saved_bytes_leave_out_parameters_in_every_view():
    """A Linear without an input that needs a gradient keeps its input only; with one, the weight, which is there."""
    model, x = nn.Linear(30, 20), torch.randn(5, 30)
    assert count.saved_bytes(lambda: model(x), model).bytes == 4 * 5 * 30
    x.requires_grad_()
    assert count.saved_bytes(lambda: model(x), model).bytes == 4 * 5 * 30


def test_saved_bytes_count_a_storage_once():
    x = torch.randn(1000, requires_grad=True)
    model = nn.Identity()
    assert count.saved_bytes(lambda: x * x, model).bytes == 4000
    assert count.saved_bytes(lambda: torch.no_grad()(lambda: x * x)(), model).bytes == 0


def test_saved_bytes_see_checkpointing():
    model, x = mlp(64), torch.randn(4, 8, 64, requires_grad=True)
    plain = count.saved_bytes(lambda: model(x), model).bytes
    kept = count.saved_bytes(lambda: checkpoint(model, x, use_reentrant=False), model).bytes
    assert kept == x.nbytes < plain


def test_saved_tensors_say_where():
    model, x = mlp(32), torch.randn(2, 3, 32)
    where = [t.where for t in count.saved_bytes(lambda: model(x), model).tensors]
    assert where == ["0 (LayerNorm)"] * 3 + ["1 (Linear)", "2 (GELU)", "3 (Linear)"]


def test_counting_leaves_the_model_as_it_was():
    model, x = mlp(32), torch.randn(2, 3, 32)
    before = model(x)
    count.saved_bytes(lambda: model(x), model)
    assert torch.equal(model(x), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("rows", "inner", "columns"), [(8, 16, 32), (5, 7, 11)])
def test_flops_of_a_linear_layer(rows, inner, columns):
    """Forward 2·n·k·m; backward once more for each of the two gradients (here the input needs none)."""
    layer, x = nn.Linear(inner, columns), torch.randn(rows, inner)
    forward = 2 * rows * inner * columns
    assert count.flops(lambda: layer(x)) == forward
    assert count.flops(lambda: layer(x).sum().backward()) == 2 * forward
    x.requires_grad_()
    assert count.flops(lambda: layer(x).sum().backward()) == 3 * forward


def test_flops_of_a_convolution():
    layer, x = nn.Conv2d(3, 8, 5, padding=2), torch.randn(2, 3, 12, 12)
    assert count.flops(lambda: layer(x)) == 2 * (2 * 8 * 12 * 12) * (3 * 5 * 5)


def test_flops_of_a_cpus_attention_whatever_pytorch_knows(monkeypatch):
    """Two products forward; five backward, which computes the scores again. torch 2.11 has no formula for them."""
    from torch.utils import flop_counter

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.delitem(flop_counter.flop_registry, kernel, raising=False)
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))  # (B, heads, T, C)
    product = 2 * 2 * 3 * 5 * 5 * 4
    out = nn.functional.scaled_dot_product_attention(q, k, v)
    assert count.flops(lambda: nn.functional.scaled_dot_product_attention(q, k, v)) == 2 * product
    assert count.flops(lambda: out.sum().backward()) == 5 * product


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_state_bytes(optimizer):
    model = nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20))
    n = 10 * 20 + 20 + 20 + 20
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }[optimizer]()
    fresh = count.state_bytes(model, made)
    assert (fresh.parameters, fresh.gradients, fresh.optimizer) == (4 * n, 0, 0)
    model(torch.randn(4, 10)).sum().backward()
    made.step()
    after = count.state_bytes(model, made)
    steps = 4 * len(list(model.parameters()))  # AdamW keeps a step counter a parameter
    assert after.gradients == 4 * n
    assert after.optimizer == {"sgd": 0, "momentum": 4 * n, "adamw": 8 * n + steps}[optimizer]
    assert after.buffers == 4 * 20 * 2 + 8
    assert after.total == after.parameters + after.gradients + after.optimizer + after.buffers


def test_tied_weights_count_once():
    a, b = nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)
    b.weight = a.weight
    assert count.state_bytes(nn.Sequential(a, b)).parameters == 400


def linear_step(width: int, rows: int, layers: int, optimizer=torch.optim.Adam):
    def build():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        made = optimizer(model.parameters(), lr=1e-3)
        x = torch.randn(rows, width)

        def step():
            model(x).sum().backward()
            made.step()
            made.zero_grad()

        return model, made, step

    return build


def test_predicted_state_by_formula():
    width, layers = 256, 4
    peak = count.predict_peak_memory(linear_step(width, 8, layers))
    parameters = 4 * layers * width**2
    assert peak.by_kind["parameter"] == parameters
    # Adam: two moments a parameter, a scalar counter each, and a few temporaries of one weight while it steps
    assert 2 * parameters < peak.by_kind["optstate"] <= 2 * parameters + 4 * (4 * width**2)
    assert peak.total == sum(peak.by_kind.values())


def test_predicted_activations_grow_with_the_batch():
    """With wide batches the peak is activations: each layer keeps its input, 4 bytes an element."""
    width, layers = 64, 4
    small, large = (
        count.predict_peak_memory(linear_step(width, rows, layers, torch.optim.SGD)).total for rows in (4096, 8192)
    )
    kept = 4 * 4096 * width
    assert (layers - 1) * kept <= large - small <= (layers + 3) * kept


def accumulating_step(pieces: int, rows: int = 4096, width: int = 64, run=lambda model, x: model(x)):
    def build():
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        parts = [torch.randn(rows, width) for _ in range(pieces)]

        def step():
            for x in parts:
                run(model, x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    return build


@pytest.mark.parametrize("pieces", [2, 5])
def test_prediction_with_gradient_accumulation_by_formula(pieces):
    """A later micro-batch meets all four gradients at its peak, a single batch the last layer's alone."""
    once, often = (count.predict_peak_memory(accumulating_step(n)).total for n in (1, pieces))
    assert often - once == 3 * 4 * 64**2


def test_prediction_of_a_forward_that_backward_repeats():
    """A model that is checkpointed as a whole keeps as much at its peak as without: all of it is computed again."""
    plain, repeated = (
        count.predict_peak_memory(accumulating_step(2, run=run)).total
        for run in (lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=False))
    )
    assert repeated == pytest.approx(plain, rel=0.3)


def test_prediction_leaves_no_hook_behind():
    before = len(nn.modules.module._global_forward_pre_hooks)
    count.predict_peak_memory(accumulating_step(1))
    assert len(nn.modules.module._global_forward_pre_hooks) == before


def test_prediction_allocates_nothing():
    """A model of some 100 GB is predicted on any laptop."""
    peak = count.predict_peak_memory(linear_step(80_000, 4, 1, torch.optim.SGD))
    assert peak.total > 25e9


def test_predicting_a_vision_transformer_restores_initialisation():
    from torchvision.models.vision_transformer import VisionTransformer

    def build():
        model = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images = torch.randn(4, 3, 32, 32)

        def step():
            model(images).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, optimizer, step

    assert count.predict_peak_memory(build).total > 0
    weight = torch.zeros(50, 50)
    nn.init.trunc_normal_(weight)
    assert weight.std() > 0.5


def test_state_bytes_of_a_sharded_model_are_the_part_of_this_process():
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = nn.Linear(8, 100, bias=False)
        mesh = init_device_mesh("cpu", (4,))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
        assert count.state_bytes(model).parameters == 4 * 8 * 100 / 4
    finally:
        distributed.destroy_process_group()


def test_operations_of_a_layer_forward_and_backward():
    """A product with its bias forward; backward two products, a sum for the bias, and the seed of the gradient."""
    model, x = nn.Linear(6, 4), torch.randn(3, 6, requires_grad=True)
    found = count.operations(lambda: model(x).sum().backward())
    assert found == {
        ("addmm", "fp32", "fp32"): 1, ("sum", "fp32", "fp32"): 2, ("ones_like", "fp32", "fp32"): 1,
        ("mm", "fp32", "fp32"): 2,
    }  # fmt: skip


def test_operations_see_casts_and_leave_out_views():
    x = torch.randn(3, 6)
    assert count.operations(lambda: x.t().reshape(3, 6)[:2].bfloat16()) == {
        ("clone", "fp32", "fp32"): 1,
        ("_to_copy", "fp32", "bf16"): 1,
    }
    assert not count.operations(lambda: torch.empty(2, 3).view(6).unsqueeze(0).transpose(0, 1))


def test_grouped_convolutions_and_recurrent_layers_are_the_closed_formulas():
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    for groups in (1, 2, 8):
        layer = nn.Conv2d(8, 16, 3, padding=1, groups=groups)
        forward = 2 * 9 * (8 // groups) * 16 * 36 * 2
        assert count.flops(lambda layer=layer: layer(x).sum().backward()) == 3 * forward
    texts = torch.randn(3, 5, 8, requires_grad=True)
    for bias in (True, False):
        lstm = nn.LSTM(8, 16, num_layers=2, bidirectional=True, bias=bias)
        each = sum(p.numel() for p in lstm.parameters() if p.dim() == 2)
        assert count.flops(lambda lstm=lstm: lstm(texts)[0].sum().backward()) == 3 * 2 * 15 * each


def test_on_meta_and_fake_tensors_each_storage_counts():
    """Their storages have no address."""

    def bytes_of() -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
        x = torch.randn(4, 10)
        return count.state_bytes(model).parameters, count.saved_bytes(lambda: model(x), model).bytes

    real = bytes_of()
    with torch.device("meta"):
        assert bytes_of() == real
    with FakeTensorMode():
        assert bytes_of() == real


def test_of_what_is_sharded_a_process_keeps_its_part_for_backward():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
        model = parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
        saved = count.saved_bytes(lambda: model(torch.randn(8, 8)) + 0, model)  # the sum waits for its all-reduce
        # the whole input of the first layer, and a quarter of the second one's
        assert sorted(t.bytes for t in saved.tensors) == [4 * 8 * 8, 4 * 8 * 32 // 4]
    finally:
        dist.destroy_process_group()
