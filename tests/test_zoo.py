"""The zoo and the reference: each case is what it claims to be, and the reference is what DDP computes."""

from __future__ import annotations

import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness import rank, ranks, world_size
from tests.zoo import (
    ZOO,
    Batch,
    Case,
    Reference,
    assert_close,
    assert_same_run,
    build,
    gan,
    global_batch,
    local_batch,
    reference_steps,
)

CASES = 21
NOT_EQUAL_TO_BIG_BATCH = {"conv_batchnorm", "layerdrop"}

every_case = pytest.mark.parametrize("case", ZOO.values(), ids=ZOO.keys())


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def test_number_of_cases() -> None:
    assert len(ZOO) == CASES
    assert all(case.name == name for name, case in ZOO.items())
    assert {name for name, case in ZOO.items() if not case.equals_big_batch} == NOT_EQUAL_TO_BIG_BATCH


# ------------------------------------------------------------------------------------------------- every case


@every_case
def test_one_step_is_finite_and_small(case: Case) -> None:
    reference = reference_steps(case, 1, 2, 1, sgd)
    assert all(torch.tensor(losses).isfinite().all() for losses in reference.rank_losses)
    gradients = [gradient for gradient in reference.gradients[0].values() if gradient is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.dtype is torch.float64 for gradient in gradients)
    assert sum(parameter.numel() for parameter in reference.parameters.values()) < 15_000


@every_case
def test_batches_and_models_are_reproducible(case: Case) -> None:
    state = torch.get_rng_state()
    first, second, other = (global_batch(case, step, samples=4) for step in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state), "a batch must not disturb the initial weights"
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), tensors(second), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(tensors(first), tensors(other), strict=True))
    assert all(len(tensor) == 4 for tensor in tensors(first))
    models = [build(case, seed) for seed in (1, 1, 2)]
    values = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert pickle.loads(pickle.dumps(case)) is case


@every_case
def test_claim_to_equal_the_big_batch(case: Case) -> None:
    parts, whole = (reference_steps(case, 1, world, 2, sgd, samples=8) for world in (4, 1))
    if case.equals_big_batch:
        assert_same_run(parts, whole)
    else:
        with pytest.raises(AssertionError, match="largest error"):
            assert_same_run(parts, whole)


@every_case
def test_claim_about_the_path_of_ranks(case: Case) -> None:
    model = build(case)
    batch = global_batch(case, 0, samples=8)
    paths = [calls(case, model, local_batch(batch, rank, 4)) for rank in range(4)]
    if case.same_path_on_all_ranks:
        assert all(path == paths[0] for path in paths)
    else:
        assert len({frozenset(path) for path in paths}) > 1, "some rank must leave out what another runs"


@every_case
def test_claim_about_buffers(case: Case) -> None:
    before = {name: buffer.clone() for name, buffer in build(case).named_buffers()}
    after = reference_steps(case, 1, 2, 1, sgd).buffers
    changed = any(not torch.equal(before[name], after[name]) for name in before)
    assert changed == case.changes_buffers


@every_case
def test_no_gradient_is_rounding_noise(case: Case) -> None:
    """Else Adam makes steps out of noise, and no two orders of summation agree."""
    gradients = reference_steps(case, 1, 2, 1, sgd).gradients[0]
    noise = {
        name: gradient.abs()[gradient != 0].min().item()
        for name, gradient in gradients.items()
        if gradient is not None and bool(((gradient != 0) & (gradient.abs() < 1e-13)).any())
    }
    assert noise == {}


@ranks(2)
@every_case
def test_reference_equals_ddp(case: Case) -> None:
    want = reference_steps(case, 2, world_size(), 2, adamw)
    got = train_with_ddp(case, adamw, synchronize=True)
    assert_same_run(got, want)
    own = [[losses[rank()] for losses in step] for step in want.rank_losses]
    assert_close("own losses", torch.tensor(got.rank_losses).squeeze(-1), torch.tensor(own))


@ranks(2)
def test_missing_reduction_is_caught() -> None:
    case = ZOO["gpt2"]
    want = reference_steps(case, 2, world_size(), 2, adamw)
    with pytest.raises(AssertionError, match="largest error"):
        assert_same_run(train_with_ddp(case, adamw, synchronize=False), want)


def train_with_ddp(
    case: Case, optimizer_factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], synchronize: bool
) -> Reference:
    """Two steps of two accumulated batches, as a user of DDP would write them."""
    model = build(case)
    reentrant = case.name == "llama_recompute_reentrant"  # DDP cannot look for unused parameters there
    parallel = DistributedDataParallel(model, find_unused_parameters=not reentrant)
    optimizer = optimizer_factory(parallel.parameters())
    result = Reference()
    for step in range(2):
        optimizer.zero_grad()
        losses = []
        for index in range(2):
            batch = global_batch(case, step, index, samples=2 * world_size())
            last = index == 1
            with contextlib.nullcontext() if last and synchronize else parallel.no_sync():
                loss = case.loss(parallel, local_batch(batch, rank(), world_size()))
                torch.autograd.backward(loss / 2)
            losses.append([loss.item()])
        result.rank_losses.append(losses)
        result.gradients.append({name: copy(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
    result.parameters = {name: p.detach() for name, p in model.named_parameters()}
    if rank() == 0:  # the others keep what their own last forward made of rank 0's
        result.buffers = dict(model.named_buffers())
    return result


# -------------------------------------------------------------------------------------------- single properties


def test_shapes_of_the_odd_case() -> None:
    sizes = [parameter.numel() for parameter in build(ZOO["odd"]).parameters()]
    assert sizes[:4] == [1, 1, 3, 5]
    buffers = reference_steps(ZOO["odd"], 3, 4, 2, sgd).buffers
    assert buffers["steps"].item() == 6  # rank 0's forwards, not those of all ranks
    assert "window" in buffers


def test_albert_uses_one_layer_four_times() -> None:
    case = ZOO["albert"]
    counts = calls(case, build(case), global_batch(case, 0, samples=2))
    assert counts["albert.encoder.albert_layer_groups.0.albert_layers.0"] == 4


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert"])
def test_tied_models_have_one_parameter_under_two_names(name: str) -> None:
    model = build(ZOO[name])
    once, twice = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    assert len(twice) > len(once)


def test_unused_parameters_have_no_gradient() -> None:
    gradients = reference_steps(ZOO["unused"], 1, 2, 1, sgd).gradients[0]
    missing = {name for name, gradient in gradients.items() if gradient is None}
    assert len(missing) == 5
    assert all(name.startswith("forgotten") for name in missing)


@pytest.mark.parametrize(("name", "trainable", "frozen"), [("lora", 8, 21), ("mixed_frozen", 7, 3)])
def test_frozen_parameters(name: str, trainable: int, frozen: int) -> None:
    parameters = list(build(ZOO[name]).parameters())
    assert sum(parameter.requires_grad for parameter in parameters) == trainable
    assert sum(not parameter.requires_grad for parameter in parameters) == frozen


@pytest.mark.parametrize("name", ["llama_recompute", "llama_recompute_reentrant", "checkpoint_inside"])
def test_recomputing_models_run_their_layers_again_in_backward(name: str) -> None:
    case = ZOO[name]
    model = build(case)
    counts: Counter[str] = Counter()
    with counting(model, counts):
        loss = case.loss(model, global_batch(case, 0, samples=2))
        in_forward = counts.copy()
        torch.autograd.backward(loss)
    assert counts.total() > in_forward.total()


@pytest.mark.parametrize("name", ["moe_layers", "moe_toplevel"])
@pytest.mark.parametrize("world", [2, 4])
def test_some_expert_is_busy_on_one_rank_and_idle_on_another(name: str, world: int) -> None:
    case = ZOO[name]
    model = build(case)
    batches = [global_batch(case, step, samples=2 * world) for step in range(3)]
    experts = {name for name, module in model.named_modules() if type(module).__name__ == "Expert"}
    uneven = []
    for batch in batches:
        paths = [calls(case, model, local_batch(batch, rank, world)) for rank in range(world)]
        used_by = {expert: sum(expert in path for path in paths) for expert in experts}
        uneven.append(any(0 < used < world for used in used_by.values()))
    assert uneven == [True, True, True]


def test_gan_takes_a_step_of_each_network() -> None:
    torch.manual_seed(0)
    generator, discriminator = gan.make_generator(), gan.make_discriminator()
    real, noise = gan.batches(4, 1)
    torch.autograd.backward(gan.discriminator_loss(discriminator, real, generator(noise)))
    assert all(p.grad is None for p in generator.parameters())
    assert all(p.grad is not None for p in discriminator.parameters())
    torch.autograd.backward(gan.generator_loss(discriminator, generator(noise)))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in generator.parameters())


# ------------------------------------------------------------------------------------------------ assert_close


def test_assert_close_measures_relative_to_the_largest_element() -> None:
    want = torch.tensor([[100.0, 1.0], [0.0, -2.0]], dtype=torch.float64)
    assert_close("same", want.clone(), want)
    assert_close("within", want + 9e-9, want)
    with pytest.raises(AssertionError, match=r"layer\.weight: largest error 2\.0+e-08 at \(1, 1\) of shape \(2, 2\)"):
        assert_close("layer.weight", want + torch.tensor([[0, 0], [0, 2e-8]]), want)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        (None, torch.zeros(2), "None, but it should be a tensor"),
        (torch.zeros(2), None, "a tensor of shape .2,., but it should be None"),
        (torch.zeros(2), torch.zeros(2, 1), "shape .2,., but it should be .2, 1."),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "largest error inf|largest error nan"),
        (torch.tensor(1.0 + 1e-9, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64), "largest error"),
        (torch.tensor(3), torch.tensor(2), "largest error 1"),
        (1.0, 1.1, "largest error"),
    ],
)
def test_assert_close_fails(got: Tensor | float | None, want: Tensor | float | None, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close("x", got, want)


def test_assert_close_accepts_equals_of_every_kind() -> None:
    assert_close("none", None, None)
    assert_close("empty", torch.empty(0), torch.empty(0))
    assert_close("scalar", torch.tensor(2), torch.tensor(2))
    assert_close("zero", torch.tensor([1e-18]), torch.tensor([0.0]))


# ----------------------------------------------------------------------------------------------------- shared


def tensors(batch: Batch) -> list[Tensor]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


@contextlib.contextmanager
def counting(model: nn.Module, counts: Counter[str]) -> Iterator[None]:
    """Count the calls of each submodule by name."""

    def hook_for(name: str) -> Callable[[nn.Module, object], None]:
        return lambda module, inputs: counts.update([name])

    hooks = [module.register_forward_pre_hook(hook_for(name)) for name, module in model.named_modules()]
    yield
    for hook in hooks:
        hook.remove()


def calls(case: Case, model: nn.Module, batch: Batch) -> Counter[str]:
    """How often a forward calls each submodule."""
    counts: Counter[str] = Counter()
    with counting(model, counts):
        case.loss(model, batch)
    return counts
