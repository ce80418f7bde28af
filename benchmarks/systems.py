"""One class per system: what it wraps around the model, and what one training step looks like with it.

Every system gets the same unwrapped model and the same AdamW settings and returns a function from a batch to
the local loss. All are given what their own documentation recommends for a transformer: a unit per decoder
layer for FSDP (the rest of the model is the root unit), gradients as views of the buckets for DDP, parameters
as views of buckets for ZeroRedundancyOptimizer, buckets that fit the model for DeepSpeed.

Nothing beyond the standard library is imported before a worker process asks for it: what is missing or broken
in one system must not touch another.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.workload import Job

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import AdamW

    from lightning_dist.comm import Mesh
    from lightning_dist.core.layout import Layout

# What a process that has imported torch and transformers occupies before it has a model.
RUNTIME_BYTES = 250 * 2**20


@dataclass
class Training:
    """A system ready to train: one step, and (ours only) bytes that its ledger has counted, and those in its arenas."""

    step: Callable[[Tensor], Tensor]
    ledger_bytes: Callable[[], int] | None = None
    shared_bytes: Callable[[], int] = lambda: 0


class System(ABC):
    """What can be compared.

    `resident` is a guess of what rests in a rank, in units of the fp32 parameters; it only plans groups.
    """

    name: str
    label: str
    stage: str
    resident: float
    needs: tuple[str, ...] = ("transformers.models.llama.modeling_llama",)
    averages_gradients = True
    whole_batch = False  # every rank computes the global batch (tensor parallelism)

    def require(self) -> None:
        """Import what the system needs; an error here means that it is not available."""
        for module in self.needs:
            importlib.import_module(module)

    @abstractmethod
    def prepare(self, model: nn.Module, job: Job) -> Training:
        """Wrap the model; the process group is up already."""

    def resident_bytes(self, job: Job) -> int:
        # The allocator keeps most of what a step used, so activations count although none are alive.
        return RUNTIME_BYTES + int(self.resident * job.parameter_bytes) + job.activation_bytes


def adamw_settings(job: Job) -> dict[str, Any]:
    return {"lr": job.learning_rate, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


def adamw(model: nn.Module, job: Job) -> AdamW:
    import torch

    return torch.optim.AdamW(model.parameters(), **adamw_settings(job))


def autocast(job: Job) -> contextlib.AbstractContextManager[Any]:
    """What DDP calls bf16-mixed: fp32 weights, bf16 inside the matrix products."""
    import torch

    if job.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=torch.bfloat16)


def plain_step(
    module: Callable[..., Any],
    optimizer: Any,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Callable[[Tensor], Tensor]:
    """The training step of a plain PyTorch loop."""

    def step(tokens: Tensor) -> Tensor:
        with context():
            loss: Tensor = module(input_ids=tokens, labels=tokens).loss
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class NoCommunication(System):
    """Each rank trains by itself on its part of the batch: what a step costs without communication."""

    name, label, stage, resident = "alone", "no communication (floor)", "-", 3.2
    averages_gradients = False

    def prepare(self, model: nn.Module, job: Job) -> Training:
        return Training(plain_step(model, adamw(model, job), lambda: autocast(job)))


class DDP(System):
    """torch's DistributedDataParallel, the base of every ratio."""

    name, label, stage, resident = "ddp", "torch DDP", "0", 4.2

    def prepare(self, model: nn.Module, job: Job) -> Training:
        from torch.nn.parallel import DistributedDataParallel

        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Training(plain_step(module, adamw(model, job), lambda: autocast(job)))


class DDPTwin(DDP):
    """DDP against DDP: its ratio is 1 but for noise, and its quartiles say how much noise a run had."""

    name, label = "ddp-twin", "torch DDP again (noise check)"


class DDPZeroRedundancy(System):
    name, label, stage, resident = "ddp-zero1", "DDP + ZeroRedundancyOptimizer", "1", 3.2

    def prepare(self, model: nn.Module, job: Job) -> Training:
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            **adamw_settings(job),
        )
        return Training(plain_step(module, optimizer, lambda: autocast(job)))


class FSDP2(System):
    """fully_shard on every decoder layer and on the root."""

    def __init__(self, *, reshard: bool) -> None:
        self._reshard = reshard
        self.name = "fsdp2-zero3" if reshard else "fsdp2-zero2"
        self.label = "FSDP2 " + ("reshard" if reshard else "no reshard")
        self.stage = "3" if reshard else "2"
        self.resident = 2.6

    def prepare(self, model: nn.Module, job: Job) -> Training:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (job.world_size,)),
            "reshard_after_forward": self._reshard,
        }
        if job.precision == "bf16-mixed":
            mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["mp_policy"] = mixed
        for layer in decoder_layers(model):
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return Training(plain_step(model, adamw(model, job)))


class FSDP1(System):
    """FullyShardedDataParallel, wrapped around every decoder layer and the root."""

    def __init__(self, strategy: str, stage: str) -> None:
        self._strategy = strategy
        self.name = f"fsdp1-zero{stage}"
        self.label = f"FSDP1 {strategy}"
        self.stage = stage
        self.resident = 2.8

    def prepare(self, model: nn.Module, job: Job) -> Training:
        import torch
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        module = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(decoder_layers(model)[0])}),
            sharding_strategy=ShardingStrategy[self._strategy],
            mixed_precision=mixed if job.precision == "bf16-mixed" else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return Training(plain_step(module, adamw(module, job)))


class DeepSpeed(System):
    """DeepSpeed's engine with torch's AdamW.

    Its default buckets hold 500 million elements, gigabytes however small the model, so here they fit the
    model unless the job asks for the defaults. Stage 3 keeps gathered parameters up to
    `stage3_max_live_parameters`, a billion by default, and so releases none of a small model; `release` makes
    it release them, as ZeRO-3 means.
    """

    needs = (*System.needs, "deepspeed")

    def __init__(self, stage: int, *, release: bool = False) -> None:
        self._stage = stage
        self._release = release
        self.name = f"deepspeed{stage}" + ("-release" if release else "")
        self.label = f"DeepSpeed ZeRO-{stage}" + (", releasing" if release else "")
        self.stage = str(stage)
        self.resident = {1: 3.0, 2: 3.2, 3: 4.2}[stage]

    def resident_bytes(self, job: Job) -> int:
        oversized = 2 * 2**30 if job.deepspeed_buckets == "default" and not self._release else 0
        return super().resident_bytes(job) + oversized + 200 * 2**20

    def zero_options(self, job: Job) -> dict[str, Any]:
        options: dict[str, Any] = {"stage": self._stage}
        size = job.size
        if job.deepspeed_buckets == "fit" or self._release:
            bucket = max(size.largest_parameter, size.num_parameters // 8)
            options |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
            if self._stage == 3:
                options |= {
                    "stage3_prefetch_bucket_size": bucket,
                    "stage3_param_persistence_threshold": 2 * size.hidden,
                }
        if self._release:
            options |= {
                "stage3_max_live_parameters": 2 * max(size.layer_parameters, size.largest_parameter),
                "stage3_max_reuse_distance": size.layer_parameters,
                "stage3_prefetch_bucket_size": size.layer_parameters,
            }
        return options

    def prepare(self, model: nn.Module, job: Job) -> Training:
        deepspeed: Any = importlib.import_module("deepspeed")
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": job.micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # it clips to 1.0 by default and would train otherwise than all others
            "zero_optimization": self.zero_options(job),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": job.precision == "bf16-mixed"},
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=adamw(model, job), config=config, dist_init_required=False
        )

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Training(step)


class Ours(System):
    """lightning_dist's ZeroEngine in a plain loop."""

    needs = (*System.needs, "lightning_dist.zero", "lightning_dist.tensor")
    zero_stage = 0

    def layout(self, job: Job) -> Layout:
        """How the ranks are laid out."""
        from lightning_dist.core.layout import Layout

        return Layout(dp=job.world_size)

    def cut(self, model: nn.Module, mesh: Mesh) -> None:
        """What is done to the model before the engine takes it."""

    def prepare(self, model: nn.Module, job: Job) -> Training:
        import torch

        from lightning_dist.comm import Mesh
        from lightning_dist.core.allocator import keep_freed_memory
        from lightning_dist.zero import ZeroEngine

        keep_freed_memory()  # as our strategies do on the CPU
        mesh = Mesh.from_world(self.layout(job))
        self.cut(model, mesh)
        compute_dtype = torch.bfloat16 if job.precision == "bf16-mixed" else None
        engine = ZeroEngine(model, mesh, stage=self.zero_stage, compute_dtype=compute_dtype)
        optimizer = adamw(model, job)
        engine.adopt(optimizer)

        def step(tokens: Tensor) -> Tensor:
            with engine.step():
                loss: Tensor = model(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training(step, ledger_bytes=mesh.ledger.total, shared_bytes=lambda: mesh.shared_bytes)


class Zero(Ours):
    """A ZeRO stage."""

    def __init__(self, stage: int) -> None:
        self.zero_stage = stage
        self.name = f"zero{stage}"
        self.label = f"lightning_dist zero{stage}"
        self.stage = str(stage)
        self.resident = {0: 4.2, 1: 3.2, 2: 3.0, 3: 2.6}[stage]


class TensorParallel(Ours):
    """All ranks share the model, by its own plan."""

    stage, resident, whole_batch = "tp", 2.2, True

    def __init__(self, *, sequence_parallel: bool) -> None:
        self._sequence_parallel = sequence_parallel
        self.name = "tp-sp" if sequence_parallel else "tp"
        self.label = "lightning_dist tp" + (", sequence parallel" if sequence_parallel else "")

    def layout(self, job: Job) -> Layout:
        from lightning_dist.core.layout import Layout

        return Layout(tp=job.world_size)

    def cut(self, model: nn.Module, mesh: Mesh) -> None:
        from lightning_dist.tensor import cut_module

        cut_module(model, mesh.tp, sequence_parallel=self._sequence_parallel)


class DTensorParallel(System):
    """torch's parallelize_module: linears by pairs, embedding and head too, the loss from sharded logits."""

    stage, resident, whole_batch = "tp", 2.4, True

    def __init__(self, *, sequence_parallel: bool) -> None:
        self._sequence_parallel = sequence_parallel
        self.name = "dtensor-sp" if sequence_parallel else "dtensor"
        self.label = "torch DTensor" + (", sequence parallel" if sequence_parallel else "")

    def prepare(self, model: nn.Module, job: Job) -> Training:
        import torch
        import torch.nn.functional as F
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            ParallelStyle,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (job.world_size,))
        plan: dict[str, ParallelStyle] = {}
        if self._sequence_parallel:
            whole, split = Replicate(), Shard(1)
            plan["model.embed_tokens"] = RowwiseParallel(input_layouts=whole, output_layouts=split)
            plan["model.norm"] = SequenceParallel()
            plan["lm_head"] = ColwiseParallel(input_layouts=split, output_layouts=Shard(-1), use_local_output=False)
        else:
            split = Replicate()
            plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
            plan["lm_head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        for index in range(job.size.layers):
            layer = f"model.layers.{index}"
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                plan[f"{layer}.{name}"] = ColwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[f"{layer}.{name}"] = RowwiseParallel(output_layouts=split)
            if self._sequence_parallel:
                plan[f"{layer}.input_layernorm"] = plan[f"{layer}.post_attention_layernorm"] = SequenceParallel()
                plan[f"{layer}.self_attn"] = PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": split}, desired_input_kwarg_layouts={"hidden_states": whole}
                )
                plan[f"{layer}.mlp"] = PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
        parallelize_module(model, mesh, plan)
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False)]
        groups = [{"params": kind} for kind in kinds if kind]  # fused AdamW does not take both kinds at once
        optimizer = torch.optim.AdamW(groups, **adamw_settings(job))
        vocabulary = job.size.vocabulary

        def step(tokens: Tensor) -> Tensor:
            positions = torch.arange(tokens.shape[1]).unsqueeze(0)
            with loss_parallel(), autocast(job):
                logits = model(input_ids=tokens, position_ids=positions).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
                loss.backward()  # type: ignore[no-untyped-call]
            assert logits.shape[-1] == vocabulary
            optimizer.step()
            optimizer.zero_grad()
            full: Tensor = loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()
            return full

        return Training(step)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("model.layers").children())


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        DDP(),
        DDPTwin(),
        NoCommunication(),
        *(Zero(stage) for stage in (0, 1, 2, 3)),
        DDPZeroRedundancy(),
        FSDP2(reshard=False),
        FSDP2(reshard=True),
        FSDP1("SHARD_GRAD_OP", "2"),
        FSDP1("FULL_SHARD", "3"),
        DeepSpeed(1),
        DeepSpeed(2),
        DeepSpeed(3),
        DeepSpeed(3, release=True),
        *(TensorParallel(sequence_parallel=on) for on in (False, True)),
        *(DTensorParallel(sequence_parallel=on) for on in (False, True)),
    )
}
BASE = "ddp"
